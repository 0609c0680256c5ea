"""A world of one trainer, stores, mirrors and predictors, which only public calls change.

A schedule of plain operations is generated from a seed. ``values.py`` comes first, then ``world.py`` runs a schedule
and compares with slow references. ``shrink.py`` removes operations while the finding stays. Run it by
``python -m tests.world``.
"""
