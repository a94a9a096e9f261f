"""Bundles at the coordinator: uploads that break, two at a time, what is damaged, and what there is no room for."""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from elche.errors import InvalidJob, TooMuch, Unreachable
from elche.token import Role
from elche.v1 import bundle_pb2
from elche_coordinator.roles import CALLER, Caller
from elche_coordinator.services import bundle_service
from elche_coordinator.services.bundle_service import BundleServicer
from elche_coordinator.storage import bundles as module
from elche_coordinator.storage.bundles import Bundles

P = ParamSpec("P")
DATA = random.Random(0).randbytes(1000)
NAME = hashlib.sha256(DATA).hexdigest()


def within_20_s(story: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Runs a test that is a coroutine."""

    @wraps(story)
    def test(*arguments: P.args, **more: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(story(*arguments, **more), 20))

    return test


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for one in data:
        yield one


def new_bundles(folder: Path, *in_use: str, room: int = 1 << 20) -> Bundles:
    return Bundles(folder, lambda: in_use, max_total_bytes=room)


async def read(bundles: Bundles, name: str, offset: int = 0) -> bytes:
    return b"".join([data async for data in bundles.chunks(name, offset)])


@within_20_s
async def test_an_upload_that_breaks_goes_on_where_it_was(tmp_path: Path) -> None:
    bundles = new_bundles(tmp_path)
    assert bundles.find(NAME) == (0, False)
    with pytest.raises(Unreachable, match="600 bytes before its end"):
        await bundles.write(NAME, 0, 1000, parts(DATA[:250], DATA[250:400]))
    bundles = new_bundles(tmp_path)  # the coordinator was started again
    assert bundles.find(NAME) == (400, False)
    with pytest.raises(Unreachable, match="continue from there"):
        await bundles.write(NAME, 0, 1000, parts(DATA))
    await bundles.write(NAME, 400, 1000, parts(DATA[400:]))
    assert bundles.find(NAME) == (1000, True)
    assert await read(bundles, NAME) == DATA
    assert await read(bundles, NAME, 999) == DATA[999:]
    await bundles.write(NAME, 0, 1000, parts())  # it is there


@within_20_s
async def test_two_upload_the_same(tmp_path: Path) -> None:
    bundles = new_bundles(tmp_path)
    is_half, goes_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield DATA[:500]
        is_half.set()
        await goes_on.wait()
        yield DATA[500:]

    first = asyncio.create_task(bundles.write(NAME, 0, 1000, slowly()))
    await is_half.wait()
    second = asyncio.create_task(bundles.write(NAME, 0, 1000, parts(DATA)))
    await asyncio.sleep(0)
    assert not second.done()
    goes_on.set()
    await asyncio.gather(first, second)
    assert await read(bundles, NAME) == DATA


@within_20_s
async def test_one_that_is_cancelled_lets_the_next_go_on(tmp_path: Path) -> None:
    bundles = new_bundles(tmp_path)
    is_half = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield DATA[:500]
        is_half.set()
        await asyncio.Event().wait()
        yield b""

    first = asyncio.create_task(bundles.write(NAME, 0, 1000, stuck()))
    await is_half.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await bundles.write(NAME, bundles.find(NAME)[0], 1000, parts(DATA[500:]))
    assert await read(bundles, NAME) == DATA


@within_20_s
async def test_what_is_damaged_is_refused_and_may_come_again(tmp_path: Path) -> None:
    bundles = new_bundles(tmp_path)
    with pytest.raises(InvalidJob, match="damaged in transfer"):
        await bundles.write(NAME, 0, 1000, parts(DATA[:999], b"?" if DATA[-1:] != b"?" else b"!"))
    assert bundles.find(NAME) == (0, False)
    with pytest.raises(InvalidJob, match="more bytes"):
        await bundles.write(NAME, 0, 1000, parts(DATA, b"!"))
    await bundles.write(NAME, bundles.find(NAME)[0], 1000, parts(DATA[bundles.find(NAME)[0] :]))
    assert await read(bundles, NAME) == DATA


@pytest.mark.parametrize("name", ["", "x", "../" * 21 + "x", NAME.upper(), NAME + "/"])
@within_20_s
async def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    bundles = new_bundles(tmp_path)
    for attempt in (lambda: bundles.find(name), lambda: bundles.require(name)):
        with pytest.raises(InvalidJob, match="64 hexadecimal digits"):
            attempt()
    with pytest.raises(InvalidJob, match="64 hexadecimal digits"):
        await bundles.write(name, 0, 1, parts(b"1"))


@within_20_s
async def test_the_longest_unused_make_room_and_those_in_use_never(tmp_path: Path) -> None:
    data = [random.Random(seed).randbytes(400) for seed in range(4)]
    names = [hashlib.sha256(one).hexdigest() for one in data]
    in_use: list[str] = []
    bundles = Bundles(tmp_path, lambda: in_use, max_total_bytes=1000)

    async def write(index: int) -> None:
        await bundles.write(names[index], 0, 400, parts(data[index]))

    def there() -> set[int]:
        return {index for index, name in enumerate(names) if bundles.find(name)[1]}

    for index in (0, 1):
        await write(index)
        os.utime(tmp_path / f"{names[index]}.tar.gz", (index, index))
    bundles.require(names[0])  # a job uses it
    await write(2)
    assert there() == {0, 2}
    in_use += [names[0], names[2]]
    with pytest.raises(TooMuch, match="jobs that have not ended"):
        await write(3)
    assert there() == {0, 2}
    with pytest.raises(InvalidJob, match="submit its file again"):
        bundles.require(names[1])


@within_20_s
async def test_so_many_are_kept_however_small_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,500 folders of a few bytes an upload took 30 ms of processor, and with 6,000 four times that."""
    monkeypatch.setattr(module, "MAX_BUNDLES", 2)
    data = [bytes([number]) for number in range(4)]
    names = [hashlib.sha256(one).hexdigest() for one in data]
    in_use: list[str] = []
    bundles = Bundles(tmp_path, lambda: in_use)

    async def write(index: int) -> set[int]:
        await bundles.write(names[index], 0, 1, parts(data[index]))
        os.utime(tmp_path / f"{names[index]}.tar.gz", (index, index))
        return {index for index, name in enumerate(names) if bundles.find(name)[1]}

    await write(0)
    assert await write(1) == {0, 1}
    assert await write(2) == {1, 2}
    in_use += names[1:3]
    with pytest.raises(TooMuch, match=r"jobs that have not ended.* take all of the 2 folders"):
        await write(3)
    in_use.remove(names[2])
    assert await write(3) == {1, 3}


@within_20_s
async def test_beginnings_that_nobody_goes_on_with_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = new_bundles(tmp_path)
    with pytest.raises(Unreachable):
        await bundles.write(NAME, 0, 1000, parts(DATA[:10]))
    assert new_bundles(tmp_path).find(NAME) == (10, False)
    later_s = time.time() + module.UNFINISHED_S + 1
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert new_bundles(tmp_path).find(NAME) == (0, False)


@within_20_s
async def test_uploads_that_were_given_up_keep_nobody_out(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, list, max_total_bytes=2500)
    data = [random.Random(seed).randbytes(1000) for seed in range(4)]
    names = [hashlib.sha256(one).hexdigest() for one in data]
    await bundles.write(names[0], 0, 1000, parts(data[0]))
    with pytest.raises(Unreachable):
        await bundles.write(names[1], 0, 1000, parts(data[1][:999]))
    await bundles.write(names[2], 0, 1000, parts(data[2]))
    assert [bundles.find(name)[1] for name in names[:3]] == [True, False, True]
    assert bundles.find(names[1])[0] == 0


@within_20_s
async def test_what_others_send_counts_and_who_finds_no_room_removes_nothing(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, list, max_total_bytes=2500)
    data = [random.Random(seed).randbytes(1000) for seed in range(4)]
    names = [hashlib.sha256(one).hexdigest() for one in data]
    await bundles.write(names[0], 0, 1000, parts(data[0]))
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        begun.set()
        await goes_on.wait()
        yield data[1]

    first = asyncio.create_task(bundles.write(names[1], 0, 1000, slowly()))
    await begun.wait()
    with pytest.raises(TooMuch):
        await bundles.write(names[2], 0, 2000, parts(data[2], data[3]))
    assert bundles.find(names[0])[1]
    await bundles.write(names[2], 0, 1000, parts(data[2]))
    assert not bundles.find(names[0])[1], "it was the least needed"
    goes_on.set()
    await first
    assert bundles.find(names[1])[1]


async def stalled(*data: bytes) -> AsyncIterator[bytes]:
    """Some data, nothing that counts, and then nothing at all."""
    for one in (*data, b"", b""):
        yield one
    await asyncio.Event().wait()


@within_20_s
async def test_an_upload_that_sends_nothing_makes_way_for_one_of_the_same_folder(tmp_path: Path) -> None:
    bundles = Bundles(tmp_path, tuple, stall_s=0.05)
    held = asyncio.create_task(bundles.write(NAME, 0, 1000, stalled(DATA[:10])))
    await asyncio.sleep(0)
    other = asyncio.create_task(bundles.write(NAME, 10, 1000, parts(DATA[10:])))
    with pytest.raises(Unreachable, match=r"less than 256 KiB of the folder have come in 0\.05 s: send the rest"):
        await held
    await other
    assert bundles.find(NAME) == (1000, True)


@within_20_s
async def test_an_upload_of_a_byte_now_and_then_makes_way_for_one_of_the_same_folder(tmp_path: Path) -> None:
    """Each byte began its time anew, and nobody else could send the folder."""

    async def trickled() -> AsyncIterator[bytes]:
        for byte in DATA:
            yield bytes([byte])
            await asyncio.sleep(0.01)

    bundles = Bundles(tmp_path, tuple, stall_s=0.05)
    with pytest.raises(Unreachable, match="less than 256 KiB"):
        await bundles.write(NAME, 0, 1000, trickled())
    num_bytes, _ = bundles.find(NAME)
    assert 0 < num_bytes < 100
    await bundles.write(NAME, num_bytes, 1000, parts(DATA[num_bytes:]))
    assert bundles.find(NAME) == (1000, True)


@within_20_s
async def test_a_caller_announces_so_much_and_others_have_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 uploads that announced 512 MiB each and sent nothing: everybody's uploads were refused."""
    monkeypatch.setattr(bundle_service, "MAX_ANNOUNCED_BYTES_OF_CALLER", 2500)
    driver: Any = None
    servicer, may_go_on = BundleServicer(driver, new_bundles(tmp_path)), asyncio.Event()
    begun: asyncio.Queue[str] = asyncio.Queue()

    async def requests(name: str, *, waits: bool) -> AsyncIterator[bundle_pb2.UploadBundleRequest]:
        yield bundle_pb2.UploadBundleRequest(bundle=name, size_bytes=1000)
        if waits:
            begun.put_nowait(name)
            await may_go_on.wait()
        yield bundle_pb2.UploadBundleRequest(data=DATA)

    async def upload(caller: str, name: str = NAME, *, waits: bool = False) -> None:
        CALLER.set(Caller(caller, Role.USER))
        context: Any = None
        await servicer.UploadBundle(requests(name, waits=waits), context)

    held = [asyncio.create_task(upload("mallory", str(number) * 64, waits=True)) for number in range(2)]
    for _ in held:
        await begun.get()
    with pytest.raises(TooMuch, match="you have 3000 bytes of folders announced at once, and 2500 is the limit"):
        await upload("mallory")
    await upload("anna")
    may_go_on.set()
    await asyncio.wait(held)
    await upload("mallory")
