"""SOCKETS: pyzmq only. Addresses, options, doors (bound) and lines (connected).

Nothing here knows what a message means. A socket belongs to the thread that made it; the only
object that other threads may touch is a `Waker`.
"""
