"""The tape: every event of a syncer's core with what it decided, and the replay of such a tape."""
