"""TorchRec's tests of its tracker, run with the names of ``delta_tracker.compat``.

``python -m tests.torchrec_tests CHECKOUT`` reads the tests in a checkout of TorchRec. It changes their imports
(``rewriting.py``) and nothing else: no expected value, tolerance, order or table. The methods of
``DistributedModelParallel`` are patched, as :func:`delta_tracker.compat.patch_torchrec` documents. The models are those
of the installed torchrec. The exit status is 1 if a test fails that is not in ``__main__.DIFFERENT``, or if one passes
or is missing that is.

The tests of sharded models need two GPUs. On a machine without them, some imported names have stand-ins
(``stand_ins.py``), which the program lists: the models are then on the CPU, where FBGEMM has no Adam.
``python -m tests.torchrec_tests --own CHECKOUT`` checks the stand-ins: it runs the tests with TorchRec's own tracker.
On the CPU, all pass but those of the momentum, which this tracker reads from a tensor that is empty there.
"""
