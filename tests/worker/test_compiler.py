"""Optimizers do the same without PyTorch's compiler, whose import is put off; once it comes all is as PyTorch made it.

In a process of its own: here the compiler may be imported already.
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


def test_optimizers_do_the_same_without_the_compiler_and_with_it_all_is_as_pytorch_made_it() -> None:
    program = """
steps = [kind.step for kind in KINDS]
codes = [step.__code__ for step in steps]
names = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
known = {name: getattr(torch.optim.Optimizer, name) for name in names}
inner = [one.__wrapped__ for one in known.values()]

torch.optim.Optimizer.zero_grad = lambda self, set_to_none=True: None
assert not put_off() and [step.__code__ for step in steps] == codes, "what is not as known is left as it is"
torch.optim.Optimizer.zero_grad = known["zero_grad"]

assert put_off() and all(step.__code__ is not code for step, code in zip(steps, codes))
before = train()
assert COMPILER not in sys.modules, "a call has imported it"
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
assert COMPILER in sys.modules and not put_off()
assert [kind.step.__wrapped__.__code__ for kind in KINDS] == codes, "hooks stay, and are around PyTorch's own"
assert [step.__code__ for step in steps] == codes
assert not any(hasattr(one, "__dynamo_disable") for one in inner)
assert train() == before
assert all(one.__dynamo_disable is not one for one in inner), "told to the compiler, as by PyTorch"
print("as made")
"""
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, check=False)
    assert done.stdout == "as made\n", done.stderr
