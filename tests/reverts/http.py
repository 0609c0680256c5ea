"""Promises of reading over HTTP and in the pointer."""

from __future__ import annotations

from tests.reverts.revert import Revert

_STORAGE = "delta_tracker/stream/storage/storage.py"
_NGINX = "delta_tracker/stream/nginx.conf"

REVERTS: list[Revert] = [
    Revert(
        defect="a store at an http url sends a listing",
        generator="tests/contract/test_http_storage.py::test_http_stores_refuse_to_write_and_to_list_before_a_request",
        edits={
            _STORAGE: [
                ('raise ReadOnlyStoreError(self.url, f"a listing of {prefix}")', "pass"),
            ]
        },
    ),
    Revert(
        defect="a doubted object is read through the http caches",
        generator="tests/contract/test_http_storage.py::test_reads_past_the_caches_say_so_and_count_as_the_stores",
        edits={_STORAGE: [("self._options, past_cache=True)", "self._options, past_cache=False)")]},
    ),
    Revert(
        defect="a download over http does not continue at a cache with another ETag",
        generator="tests/contract/test_http_storage.py::test_a_download_continues_at_a_cache_with_another_etag_and_date",
        edits={_STORAGE: [("if self._is_http and transfer.source is not None:", "if False:")]},
    ),
    Revert(
        defect="an object without a modification time over http is from 1970",
        generator="tests/contract/test_http_storage.py::test_a_missing_modification_time_is_unknown",
        edits={_STORAGE: [("None if self._is_http and seconds <= 0 else seconds", "seconds")]},
    ),
    Revert(
        defect="the example of nginx answers doubts from its cache",
        generator="tests/system/test_nginx.py::test_a_cached_404_is_repaired_past_the_cache_for_all_readers",
        edits={_NGINX: [("    proxy_cache_bypass $past_cache;\n", "")]},
    ),
    Revert(
        defect="the example of nginx fetches an object once per reader",
        generator="tests/system/test_nginx.py::test_the_origin_sends_an_object_once_to_many_readers",
        edits={_NGINX: [("proxy_cache_lock on;", "proxy_cache_lock off;")]},
    ),
    Revert(
        defect="the example of nginx passes a 403 for a missing object on",
        generator="tests/system/test_nginx.py::test_a_403_for_a_missing_object_becomes_a_404",
        edits={_NGINX: [("    error_page 403 =404 @missing;\n", "")]},
    ),
    Revert(
        defect="the list of a forged pointer over http is not bounded",
        generator="tests/stream/test_log_index.py::test_the_list_of_a_forged_pointer_is_bounded",
        edits={"delta_tracker/stream/log_index.py": [(", found.version + 1 - _MAX_POINTED)", ")")]},
    ),
    Revert(
        defect="a late writer of the pointer moves readers back",
        generator="tests/stream/test_pointer.py::test_late_writers_never_move_a_reader_back",
        edits={
            "delta_tracker/stream/pointer.py": [
                (
                    "    is_newer = (pointer.generation, pointer.version) >= (known.generation, known.version)",
                    "    is_newer = True",
                )
            ]
        },
    ),
    Revert(
        defect="entries below the oldest of the pointer are read from caches",
        generator="tests/stream/test_log_index.py::test_entries_below_the_oldest_are_refused",
        edits={"delta_tracker/stream/log.py": [("and version < pointer.oldest:", "and version < 0:")]},
    ),
]
