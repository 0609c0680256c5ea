"""Types of JSON fields, with the limits that ``stream/FORMAT.md`` specifies.

For static type checkers, these are plain types such as ``int``. ``msgspec.convert`` checks the limits when a record is
parsed. The constructors of records do not check them.
"""

from typing import Annotated

from msgspec import Meta

MAX_COUNT = 2**63 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Range = tuple[Count, Count]
"""Half-open range. The parser must also check that the first value is at most the second."""
Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Time = Annotated[float, Meta(ge=0, lt=2**53)]
"""Unix time or a duration, in seconds."""
