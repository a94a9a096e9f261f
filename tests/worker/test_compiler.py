"""Optimizers do the same without PyTorch's compiler, whose import is put off; once it comes all is as PyTorch made it.

In processes of their own: here the compiler may be imported already.
"""

import subprocess
import sys

BEGIN = """
import hashlib, sys
import torch
from elche_worker.process.compiler import COMPILER, put_off

KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]

def train(kinds=KINDS):
    digest = hashlib.sha256()
    for kind in kinds:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            assert optimizer.step(lambda: model(torch.ones(2, 4)).sum()) is not None
        other = kind(model.parameters(), lr=0.2)
        other.load_state_dict(optimizer.state_dict())
        assert seen == [True] * 6 and torch.is_grad_enabled()
        digest.update(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    return digest.hexdigest()
"""


def outcome(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optimizers_do_the_same_without_the_compiler() -> None:
    without = outcome("""
assert put_off()
print(train())
assert COMPILER not in sys.modules, "a call has imported it"
""")
    assert without == outcome("""
print(train())
assert COMPILER in sys.modules, "PyTorch imports it no more: `put_off` can go"
assert not put_off()
""")


def test_with_the_compiler_all_is_as_pytorch_made_it() -> None:
    assert (
        outcome("""
steps = [kind.step for kind in KINDS]
codes = [step.__code__ for step in steps]
names = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
inner = [getattr(torch.optim.Optimizer, name).__wrapped__ for name in names]
assert put_off() and all(step.__code__ is not code for step, code in zip(steps, codes))
before = train()
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
assert [kind.step.__wrapped__.__code__ for kind in KINDS] == codes, "hooks stay, and are around PyTorch's own"
assert [step.__code__ for step in steps] == codes
assert not any(hasattr(one, "__dynamo_disable") for one in inner)
assert train() == before
assert all(one.__dynamo_disable is not one for one in inner), "told to the compiler, as by PyTorch"
print("as made")
""")
        == "as made"
    )


def test_optimizers_that_are_not_as_known_are_left_as_they_are() -> None:
    assert (
        outcome("""
torch.optim.Optimizer.zero_grad = lambda self, set_to_none=True: None
code = torch.optim.SGD.step.__code__
assert not put_off() and torch.optim.SGD.step.__code__ is code
print("left")
""")
        == "left"
    )
