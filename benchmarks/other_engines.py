"""Translates with pymarian or slimt. `pareto.py` runs this script in the environment that has the package.

The script reads JSON lines, each a list of texts, and answers each with the list of translations. The package slimt
downloads a list of models when it is imported, so the script imports only the extension module of slimt.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import answer

Translate = Callable[[list[str]], list[str]]


def marian(settings: dict[str, Any]) -> Translate:
    """Returns the translate method of a model. `settings` are flags of `marian-decoder`, without the dashes."""
    import pymarian  # type: ignore[import-not-found]

    translator = pymarian.Translator(**settings)
    return lambda texts: list(translator.translate(texts))


def slimt(settings: dict[str, Any]) -> Translate:
    specification = importlib.util.find_spec("slimt")
    assert specification is not None and specification.submodule_search_locations, "slimt is not installed"
    sys.path.insert(0, str(Path(next(iter(specification.submodule_search_locations)))))
    import _slimt  # type: ignore[import-not-found]

    config = _slimt.Config()
    for name in ("encoder_layers", "decoder_layers", "num_heads"):
        setattr(config, name, settings[name])
    package = _slimt.Package(**{name: settings[name] for name in ("model", "vocabulary", "shortlist")})
    service, model = _slimt.Service(workers=1, cache_size=0), _slimt.Model(config, package)
    return lambda texts: [response.target.text.strip() for response in service.translate(model, texts)]


if __name__ == "__main__":
    engine, settings = json.loads(sys.argv[sys.argv.index("--child") + 1])
    answer({"marian": marian, "slimt": slimt}[engine](settings))
