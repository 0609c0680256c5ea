"""Sets of local row ids on a device, implemented by several engines.

Open ``row_set.py`` first: it contains the base class of all engines. ``engines.py`` lists the engines and chooses one.
"""
