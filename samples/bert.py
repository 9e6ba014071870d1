"""BERT as one writes it in MindSpore, attention in plain ops, and its weights from a safetensors file."""
from __future__ import annotations

import mindspore as ms
from mindspore import Parameter, nn, ops

# Names in the file, piece by piece, and here.
_RENAMED = {"encoder.layer.": "layers.", "attention.self.": "attention.", "attention.output.dense": "attention.output",
            "attention.output.LayerNorm": "attention_norm", "intermediate.dense": "up", "output.dense": "down",
            "output.LayerNorm": "norm", "LayerNorm.weight": "norm.gamma", "LayerNorm.bias": "norm.beta",
            "attention_norm.weight": "attention_norm.gamma", "attention_norm.bias": "attention_norm.beta",
            "norm.weight": "norm.gamma", "norm.bias": "norm.beta", "embeddings.weight": "embeddings.embedding_table"}


class SelfAttention(nn.Cell):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query, self.key, self.value = (nn.Dense(width, width) for _ in range(3))
        self.output = nn.Dense(width, width)

    def split(self, x):
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, self.head_dim).transpose(0, 2, 1, 3)

    def construct(self, x, mask):
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = ops.matmul(query, key.transpose(0, 1, 3, 2)) / self.head_dim**0.5 + mask
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(x.shape))


class Layer(nn.Cell):
    def __init__(self, width, heads, inner, epsilon):
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(width, heads), nn.LayerNorm((width,), epsilon=epsilon)
        self.up, self.down = nn.Dense(width, inner), nn.Dense(inner, width)
        self.gelu, self.norm = nn.GELU(approximate=False), nn.LayerNorm((width,), epsilon=epsilon)

    def construct(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask))
        return self.norm(x + self.down(self.gelu(self.up(x))))


class Embeddings(nn.Cell):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], width)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], width)
        self.token_type_embeddings = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm((width,), epsilon=config["layer_norm_eps"])

    def construct(self, ids):
        x = self.word_embeddings(ids) + self.position_embeddings(ops.arange(ids.shape[1]))
        return self.norm(x + self.token_type_embeddings(ops.zeros_like(ids)))


class SentenceBert(nn.Cell):
    """Token ids (B, S) and a mask (B, S), 1 = token and 0 = padding, to unit vectors (B, E): the mean over tokens.

    Args:
        config (dict): The config.json of the checkpoint.
    """

    def __init__(self, config):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.CellList([
            Layer(config["hidden_size"], config["num_attention_heads"], config["intermediate_size"],
                  config["layer_norm_eps"]) for _ in range(config["num_hidden_layers"])])

    def construct(self, ids, tokens):
        batch, length = ids.shape
        mask = (1.0 - tokens.reshape(batch, 1, 1, length)) * -10000.0
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, mask)
        weights = tokens.reshape(batch, length, 1)
        mean = (x * weights).sum(axis=1) / weights.sum(axis=1)
        return mean / ops.sqrt((mean * mean).sum(axis=1, keepdims=True))


def load_weights(net: nn.Cell, file: str) -> None:
    """Fills `net` from a safetensors file of Hugging Face's BERT; every parameter must be in there."""
    weights = {}
    for name, tensor in ms.load_checkpoint(file, format="safetensors").items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        weights[name] = Parameter(tensor, name=name)
    missing, _ = ms.load_param_into_net(net, weights, strict_load=True)
    if missing:
        raise ValueError(f"{file} has no weights for {', '.join(missing)}")
