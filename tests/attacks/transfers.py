ATTACKS: list = []
WITH_KEYS: list = []
