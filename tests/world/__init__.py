"""A world of one trainer, stores, mirrors and predictors, which only public calls change.

A schedule of plain operations is generated from a seed (``values.py``). ``world.py`` runs it. ``history.py`` keeps what
was committed and ordered, ``rules.py`` checks each call of a predictor against it, and ``targets.py`` finds by brute
force where a predictor must end. ``served.py`` has what predictors write to, and ``raw_ids.py`` the table with managed
collisions that some worlds have instead of the model: each raw id reads what the trainer's evaluation read for it at
the version. ``disk.py`` lets an operation in the middle of a call fail. ``shrink.py`` removes operations while the
finding stays, and ``known.py`` keeps the findings that are not fixed yet.

Run it by ``python -m tests.world``. It uses public names only, so that the library can be changed under it.
"""
