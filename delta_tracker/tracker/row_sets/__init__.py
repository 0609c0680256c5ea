"""Sets of row numbers on a device, as bits or bytes, one engine for each way to compute them.

Open ``row_set.py`` first: it has the protocol that every engine fulfils. ``engines.py`` lists the engines and chooses
one.
"""
