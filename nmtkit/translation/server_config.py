"""The settings of a translation server that translates a corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nmtkit.config import Config, FlagRule, changed_flags, check_flags, option
from nmtkit.scoring.segments import check_segment_metric

PROMPT = "Translate the text of the user from {source} to {target}. Answer with the translation only."
SETTINGS_RULES = (
    FlagRule("--prompt", needs=("--server-api openai",)),
    FlagRule("--candidate-temperature", needs=("--candidates",)),
    FlagRule(
        "--server-api deepl",
        excludes=("--server-model", "--candidates"),
        reason="DeepL gives one candidate and has no choice of models",
    ),
    FlagRule("--choose reference", needs=("--references",)),
    FlagRule("--references", needs=("--choose reference",)),
    FlagRule("--choose-by", needs=("--choose mbr", "--choose reference")),
    *(FlagRule(f"--choose {choice}", needs=("--candidates",)) for choice in ("mbr", "reference")),
)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Settings of a server that translates a corpus."""

    from_server: str | None = option(
        None, "Address of a server that translates DATA, a text file.", metavar="URL", section="Translation by a server"
    )
    server_api: Literal["openai", "deepl"] = option("openai", "Protocol of the server.")
    server_model: str | None = option(None, "Name of the model, for --server-api openai.", metavar="NAME")
    prompt: str = option(PROMPT, "Instruction to the model, with {source} and {target} for the languages.")
    candidates: int = option(1, "Number of translations to request for each line.", min=1, max=64)
    candidate_temperature: float = option(0.7, "Temperature if --candidates is above 1, otherwise 0.", min=0, max=2)
    choose: Literal["first", "mbr", "reference"] = option(
        "first", "Candidate to use: the first; the most similar to all others (mbr); the nearest to the reference."
    )
    choose_by: str = option(
        "chrf",
        "Metric of --choose: chrf, bleu, comet, metricx, …; --choose mbr with cometkiwi or metricx-qe takes the "
        "candidate with the best estimate; comet=MODEL takes the model of a folder, or hf:ORG/NAME[@REVISION].",
        metavar="METRIC[=MODEL]",
    )
    references: Path | None = option(
        None, "Reference translations, one on each line, for --choose reference.", metavar="FILE", access="read"
    )
    requests_per_minute: float | None = option(None, "Maximum number of requests per minute; none: no limit.", above=0)
    parallel_requests: int = option(8, "Maximum number of requests at the same time.", min=1, max=1024)
    attempts: int = option(8, "Maximum attempts for a request whose failure may be temporary.", min=1, max=100)
    request_timeout: float = option(120.0, "Seconds until an attempt fails.", above=0, max=86_400)
    api_key_variable: str = option("NMTKIT_SERVER_KEY", "Environment variable with the key of the server.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_server is not None and not self.from_server.startswith(("http://", "https://")):
            raise ValueError(f"--from-server {self.from_server} is not a URL; begin it with http:// or https://")
        if self.server_api == "openai" and self.from_server is not None and self.server_model is None:
            raise ValueError("--server-api openai needs --server-model NAME")
        given = changed_flags(self) | {f"--server-api {self.server_api}", f"--choose {self.choose}"}
        check_flags(SETTINGS_RULES, given, given)
        check_segment_metric(self.choose_by, "--choose-by")
