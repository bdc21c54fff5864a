"""Write every transcript anew."""

from __future__ import annotations

from tests.transcripts.scenarios import SCENARIOS
from tests.transcripts.stage import DIRECTORY

if __name__ == "__main__":
    for name, scenario in SCENARIOS.items():
        path = DIRECTORY / f"{name}.txt"
        path.write_text(scenario().text(), encoding="utf-8")
        print(path)  # noqa: T201
