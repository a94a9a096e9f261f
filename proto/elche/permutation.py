"""Any slice of an epoch's shuffled sample order, without building or storing the whole order.

Construction: the generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002, eprint.iacr.org/2001/012, method 3), with cycle walking (method 2). A position is a cell of a
grid of about sqrt(length) rows and columns. A round shifts either the row, by a keyed hash of the column, or
the column, by a keyed hash of the row, modulo the grid's sides; each round can be undone, so the whole is a
bijection of the grid. The grid has at most sqrt(length) + 1 cells too many; an index that lands on one of
them is enciphered again until it falls below `length`, which keeps the bijection.

Round function: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014; constants by Stafford, "Mix13"), which changes every output bit with probability
close to 1/2 when an input bit changes. The round keys are the SplitMix64 sequence that starts from a hash
of seed, epoch and length.

Rounds: 12. Four make a Feistel network look random to few queries (Luby and Rackoff, SIAM J. Comput. 1988),
but here whole permutations are visible. The best generic attack on r rounds of k-bit halves needs about
2**((r - 4) * k) work (Patarin, "Generic Attacks on Feistel Schemes", ASIACRYPT 2001): with 12 rounds and
halves of 5 bits, the smallest here, 2**40, which no statistic of a training run comes near. An even number
of rows makes odd permutations as likely as even ones, which XOR-based networks cannot do.

Small lengths: a tiny grid mixes slowly, so up to 1024 the order comes from sorting the positions by their
keyed hash: exact, uniform and constant in cost.

This is for shuffling, not for secrecy. All arithmetic is on 64-bit unsigned integers modulo 2**64; results
are part of the contract between coordinator and workers, and depend on no machine and no numpy version.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64Array = npt.NDArray[np.uint64]

MAX_LENGTH = 2**62
"""The longest range that can be permuted; positions and grid cells then fit into 63 bits."""

_MAX_WORD = 2**64 - 1
_NUM_ROUNDS = 12
_SORTED_LENGTH = 1024
_BLOCK_SIZE = 2**14
"""Positions enciphered at once: 128 KiB per array, so that all rounds run within a core's cache."""

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def permutation_slice(*, seed: int, epoch: int, length: int, offset: int, size: int) -> npt.NDArray[np.int64]:
    """The samples at positions `offset` up to `offset + size` of an epoch's order, as int64 of shape (size,).

    The order is a pseudo-random permutation of range(length), another one for each seed, epoch and length;
    slices that partition the positions partition the samples. Time and memory grow with `size` alone.
    Raises ValueError for seed or epoch outside 0 to 2**64 - 1, a length outside 1 to MAX_LENGTH, and a
    slice that does not lie within the length. Source: row C4.
    """
    _check_range("seed", seed, 0, _MAX_WORD)
    _check_range("epoch", epoch, 0, _MAX_WORD)
    _check_range("length", length, 1, MAX_LENGTH)
    _check_range("offset", offset, 0, length)
    _check_range("size", size, 0, length - offset)
    key = _hash_of_words(seed, epoch, length)
    if length <= _SORTED_LENGTH:
        return _sorted_order(key, length)[offset : offset + size]
    grid = _Grid.over(length, key)
    samples = np.empty(size, dtype=np.int64)
    for start in range(0, size, _BLOCK_SIZE):
        stop = min(start + _BLOCK_SIZE, size)
        positions = np.arange(offset + start, offset + stop, dtype=np.uint64)
        samples[start:stop] = _walk(grid, positions, length)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """A keyed bijection of range(num_rows * num_columns). round_keys: one uint64 for each round."""

    num_rows: np.uint64
    num_columns: np.uint64
    round_keys: U64Array

    @classmethod
    def over(cls, length: int, key: U64Array) -> "_Grid":
        """The smallest nearly square grid with an even number of rows that has `length` cells."""
        num_rows = math.isqrt(length - 1) + 1
        num_rows += num_rows % 2
        steps = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64)
        return cls(
            num_rows=np.uint64(num_rows),
            num_columns=np.uint64(-(-length // num_rows)),
            round_keys=_mixed(steps * _GOLDEN_GAMMA + key),
        )

    def encipher(self, cells: U64Array) -> U64Array:
        """Returns the position to which each cell is moved."""
        rows = cells // self.num_columns
        columns = cells - rows * self.num_columns
        for row_key, column_key in self.round_keys.reshape(-1, 2):
            rows = _shifted(rows, columns + row_key, self.num_rows)
            columns = _shifted(columns, rows + column_key, self.num_columns)
        return rows * self.num_columns + columns


def _walk(grid: _Grid, positions: U64Array, length: int) -> U64Array:
    """Encipher, and again whatever falls outside the range: its cycle comes back inside, at the latest to
    where it started."""
    samples = grid.encipher(positions)
    outside = np.flatnonzero(samples >= np.uint64(length))
    while outside.size:
        samples[outside] = grid.encipher(samples[outside])
        outside = outside[samples[outside] >= np.uint64(length)]
    return samples


def _shifted(values: U64Array, hash_inputs: U64Array, modulus: np.uint64) -> U64Array:
    """(values + hash) mod modulus. The hash is halved so that the sum cannot overflow; overwrites `hash_inputs`.

    Division and multiplication instead of `%`: numpy divides by a constant many times faster.
    """
    shifted = _mixed(hash_inputs)
    shifted >>= np.uint64(1)
    shifted += values
    shifted -= shifted // modulus * modulus
    return shifted


def _mixed(words: U64Array) -> U64Array:
    """SplitMix64's finaliser, a bijection of 64-bit words; overwrites and returns `words`."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _hash_of_words(*words: int) -> U64Array:
    """One uint64, shape (1,): an array, because numpy warns of wrapping in scalars only."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = _mixed((state + _GOLDEN_GAMMA) ^ np.uint64(word))
    return state


def _sorted_order(key: U64Array, length: int) -> npt.NDArray[np.int64]:
    """The positions by their keyed hash. No ties: adding the key and mixing are both bijections."""
    steps = np.arange(1, length + 1, dtype=np.uint64)
    return np.argsort(_mixed(steps * _GOLDEN_GAMMA + key)).astype(np.int64)


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")


if __name__ == "__main__":
    seed, epoch, length, offset, size = map(int, sys.argv[1:])
    print(*permutation_slice(seed=seed, epoch=epoch, length=length, offset=offset, size=size).tolist())
