"""Writes frequencies.json: rotary frequencies as transformers computes them, for rope.rs of this folder's parent.

Needs torch and transformers (5.x): python make_frequencies.py
"""

import json
import pathlib

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24,
        "beta_slow": 2,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn of a short context": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.5,
    },
}

result = {}
for name, parameters in CASES.items():
    for head_dim, theta in [(16, 10000.0), (64, 100000.0), (128, 1000000.0)]:
        config = LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": theta, **parameters},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
        result[f"{name}, head_dim {head_dim}"] = {
            "head_dim": head_dim,
            "rope_parameters": {"rope_theta": theta, **parameters},
            "frequencies": [float(value) for value in frequencies],
            "attention_factor": float(factor),
        }
path = pathlib.Path(__file__).with_name("frequencies.json")
path.write_text(json.dumps(result, indent=1) + "\n")
