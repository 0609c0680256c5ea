"""Digests of the pieces of an object of format 2. With them, a reader can check a range without reading the rest."""

import xxhash

PIECE_BYTES = 8 << 20
DIGEST_BYTES = 16
DIGESTS_KEY = "digests"  # key of the tensor with the digests, the last one of the object


def num_digests(body: int) -> int:
    """Return the number of pieces in the first ``body`` bytes of an object. The last piece may be shorter."""
    return -(-body // PIECE_BYTES)


def total_bytes(body: int) -> int:
    """Return the size in bytes of an object whose digests follow its first ``body`` bytes."""
    return body + DIGEST_BYTES * num_digests(body)


def piece_at(position: int) -> tuple[int, int]:
    """Return the number of the piece that contains the byte at ``position``, and the byte's offset in that piece."""
    return divmod(position, PIECE_BYTES)


def piece_range(number: int, body: int) -> tuple[int, int]:
    """Return the half-open byte range of the piece ``number`` of an object whose body has ``body`` bytes."""
    return number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, body)


class PieceHasher:
    """Hasher of successive buffers that computes a digest of each piece of their concatenation."""

    def __init__(self) -> None:
        self._complete: list[bytes] = []
        self._piece = xxhash.xxh3_128()
        self._room = PIECE_BYTES

    def update(self, buffer: memoryview) -> None:
        """Append a buffer of bytes."""
        while len(buffer):
            taken = buffer[: self._room]
            self._piece.update(taken)
            self._room -= len(taken)
            buffer = buffer[len(taken) :]
            if not self._room:
                self._end_piece()

    def digests(self) -> bytes:
        """End the last piece, and return the concatenated digests. Do not call :meth:`update` afterwards."""
        if self._room < PIECE_BYTES:
            self._end_piece()
        return b"".join(self._complete)

    def _end_piece(self) -> None:
        self._complete.append(self._piece.digest())
        self._piece.reset()
        self._room = PIECE_BYTES
