"""Types of JSON fields, with the limits that ``stream/FORMAT.md`` sets.

Static checkers see plain types. The limits are checked where a record is parsed, by ``msgspec.convert``, and not where
the library makes one.
"""

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Range = tuple[Count, Count]
"""Half-open; that the first is not above the second has to be checked beside."""
Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Time = Annotated[float, Meta(ge=0, lt=2**53)]
"""In seconds."""
