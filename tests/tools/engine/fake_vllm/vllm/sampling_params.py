from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class SamplingParams:
    temperature: float
    seed: int | None
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int] | None
    detokenize: bool
    output_kind: RequestOutputKind
