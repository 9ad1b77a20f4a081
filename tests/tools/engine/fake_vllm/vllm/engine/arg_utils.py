from dataclasses import dataclass
from typing import Any


@dataclass
class EngineArgs:
    model: str
    skip_tokenizer_init: bool = False
    seed: int = 0
    disable_log_stats: bool = True
    max_num_seqs: int = 4
    max_model_len: int = 4096
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    speculative_config: dict[str, Any] | None = None
