"""Continues a prompt with a model of bytes_gpt.py, using PyTorch and safetensors alone: elche is not needed.

python examples/load_without_elche.py runs/bytes_gpt-.../model.safetensors "def main("
"""

import sys

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

HEAD_WIDTH = 32
NUM_BYTES = 300
TIED = "head.weight"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_ntc: Tensor) -> Tensor:
        projected = self.queries_keys_values(self.norm_1(x_ntc)).unflatten(2, (3, -1, HEAD_WIDTH))
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        attended_nhtd = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x_ntc = x_ntc + self.attended(attended_nhtd.transpose(1, 2).flatten(2))
        mapped_ntc: Tensor = self.mlp(self.norm_2(x_ntc))
        return x_ntc + mapped_ntc


class GPT(nn.Module):
    """The model of bytes_gpt.py: bytes (N, T) to logits (N, T, 256) of the next ones."""

    def __init__(self, width: int, num_blocks: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, bytes_nt: Tensor) -> Tensor:
        x_ntc = self.embedding(bytes_nt) + self.positions[: bytes_nt.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x_ntc)))
        return logits


def load(path: str) -> GPT:
    """The trained model; its sizes are those of the file's tensors. Raises `ValueError` when it is another model's."""
    tensors = load_file(path)
    if "positions" not in tensors:
        raise ValueError(f"{path} is not a model of bytes_gpt.py")
    context, width = tensors["positions"].shape
    num_blocks = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    model = GPT(width, num_blocks, context)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if set(missing) - {TIED} or unexpected:
        raise ValueError(f"{path} lacks {missing} and has {unexpected}")
    return model.eval()


@torch.no_grad()
def write_on(model: GPT, prompt: bytes, num_bytes: int) -> bytes:
    """The prompt and as many more bytes, each drawn from what the model predicts."""
    context = len(model.positions)
    text = torch.tensor([list(prompt)])
    for _ in range(num_bytes):
        probabilities = model(text[:, -context:])[:, -1].softmax(1)
        text = torch.cat([text, torch.multinomial(probabilities, 1)], dim=1)
    return bytes(text[0].tolist())


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, prompt = sys.argv[1:]
    print(write_on(load(path), prompt.encode(), NUM_BYTES).decode(errors="replace"))


if __name__ == "__main__":
    main()
