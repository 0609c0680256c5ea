"""A simulated world of trainers, stores, mirrors and predictors, which only public calls change.

A schedule of plain operations is generated from a seed (``values.py``). ``world.py`` runs it. ``threads.py`` runs the
threads of all processes one at a time, in an order that the seed decides, and simulates the clock, so that a seed gives
one run. A trainer has one rank with a plain model (``trainer.py``), or up to four ranks with sharded tables or a table
of raw ids (``job.py``, ``shards.py``, ``raw_ids.py``), which are threads in simulated process groups (``ranks.py``). In
some worlds, two pairs of ranks train replicas of the sharded tables in a ``DMPCollection``, which averages them now and
then. Predictors must serve those of the first pair.

In some worlds of one rank, a trainer restarts with other tables (``SHAPES`` in ``trainer.py``): with new weights,
restored, or as a standby that takes over. Predictors have a model of these, and stop or apply what fits. The reference
compares the sizes of both by name, as the copies of each version have them.

In some worlds of object stores, each actor has only the permissions that the guide grants to its role (``roles.py``).
What its role needs is never refused. Sometimes one actor has a lesser role; training and serving then continue without
it, and its advice leads to the permission. In others, the previous release reads the stores and publishes the first
versions, in one process for all worlds of a program (``previous.py``). In some worlds of several ranks, mirrors copy
the parts of some tables only: they are read as far as a predictor needs these tables, and never promoted.

In some worlds, a program on each rank reads the changed rows by the methods of TorchRec's tracker: no row is missing
that has changed since its last read, and the former rows are exact.

``history.py`` keeps what was committed and ordered, ``rules.py`` checks each call of a predictor against it, and
``targets.py`` finds by brute force where a predictor must end. ``stores.py`` has the stores, which ``bucket.py`` shows
as object stores, and ``web.py`` through a caching web server. ``served.py`` has what predictors write to. ``disk.py``
lets an operation in the middle of a call fail, or kills a rank there. ``shrink.py`` removes operations while the
finding stays, and ``known.py`` keeps the findings that are not fixed yet. ``operators.py`` follows
the advice of errors.

Run it by ``python -m tests.simulation``. It uses public names only, so that the library can be changed under it.
``put_back.py`` shows which of the known faults of ``tests/reverts`` it finds, and after how many operations.
``.github/CONTRIBUTING.md`` says how to add an operation, a setting, a store or a rule.
"""
