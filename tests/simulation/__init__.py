"""A world of one trainer, stores, mirrors and predictors, which only public calls change.

A schedule of plain operations is generated from a seed (``values.py``). ``world.py`` runs it. ``history.py`` keeps what
was committed and ordered, ``rules.py`` checks each call of a predictor against it, and ``targets.py`` finds by brute
force where a predictor must end. ``served.py`` has what predictors write to, and ``raw_ids.py`` the table with managed
collisions that some worlds have instead of the model: each raw id reads what the trainer's evaluation read for it at
the version. ``disk.py`` lets an operation in the middle of a call fail. ``shrink.py`` removes operations while the
finding stays, and ``known.py`` keeps the findings that are not fixed yet.

Run it by ``python -m tests.simulation``. It uses public names only, so that the library can be changed under it.

To add:

- an operation: a method ``_NAME(who, choice)`` of ``World`` that does nothing if it cannot apply, and a weight in
  ``WEIGHTS``. Add it to a theme, with a sequence in which it matters: among independent operations, three that must
  follow each other are rare.
- a rule: a function of ``rules.py`` that compares a predictor with the history, and raises ``RuleError``. Add the
  reader's side to ``Reader``; decide what a restart keeps of it. A rule about a store belongs to its operation.
- a fault of a store: a method of ``Store`` that changes files, and its end in ``repair()``. A fault in the middle of a
  call: a kind in ``FAULTS``.

Each addition needs a mutation in ``tests/reverts/simulation.py`` that only it finds.
"""
