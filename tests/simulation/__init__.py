"""A simulated world of trainers, stores, mirrors and predictors, which only public calls change.

A schedule of plain operations is generated from a seed (``values.py``). ``world.py`` runs it. ``threads.py`` runs the
threads of all processes one at a time, in an order that the seed decides, and simulates the clock, so that a seed gives
one run. A trainer has one rank with a plain model or a table of raw ids (``trainer.py``, ``raw_ids.py``), or up to four
ranks with sharded tables (``job.py``, ``shards.py``), which are threads in simulated process groups (``ranks.py``).

``history.py`` keeps what was committed and ordered, ``rules.py`` checks each call of a predictor against it, and
``targets.py`` finds by brute force where a predictor must end. ``stores.py`` has the stores, which ``bucket.py`` shows
as object stores, and ``web.py`` through a caching web server. ``served.py`` has what predictors write to. ``disk.py``
lets an operation in the middle of a call fail, or kills a rank there. ``shrink.py`` removes operations while the
finding stays, and ``known.py`` keeps the findings that are not fixed yet.

Run it by ``python -m tests.simulation``. It uses public names only, so that the library can be changed under it.
``put_back.py`` shows which of the known faults of ``tests/reverts`` it finds, and after how many operations.

To add:

- an operation: a method ``_NAME(who, choice)`` of ``World`` that does nothing if it cannot apply, and a weight in
  ``WEIGHTS``. Add it to a theme, with a sequence in which it matters: among independent operations, three that must
  follow each other are rare.
- a rule: a function of ``rules.py`` that compares a predictor with the history, and raises ``RuleError``. Add the
  reader's side to ``Reader``; decide what a restart keeps of it. A rule about a store belongs to its operation.
- a fault of a store: a method of ``Store`` that changes files, and its end in ``repair()``. A fault in the middle of a
  call: a kind in ``FAULTS``.
- a thread or a process: start it inside ``SCHEDULER.inside(Process(...))``, so that it can be killed. What waits
  outside Python, such as a request over a network, stops the world: let it wait by the scheduler instead.

Each addition needs a mutation in ``tests/reverts/simulation.py`` that only it finds.
"""
