"""Run tests of other projects with a tracker on every sharded model that they build: ``python -m tests.comparing``.

Each tracker is compared with a copy of all rows: before each forward pass and at the end of the process, a read must
have every row that differs from the copy, with the values before and after. A kernel that a test builds without a model
gets the tracker's post-lookup hook, and its ids are compared. No test is changed: a module that Python imports at the
start of each process wraps the constructors (``site/sitecustomize.py``), so that ranks in processes of their own are
compared, too. ``compared.py`` and ``kernels.py`` have the comparisons.
"""
