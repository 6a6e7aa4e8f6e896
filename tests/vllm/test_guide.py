"""The cells of docs/vllm.md run as they stand there, but for where the environment with vLLM is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
GUIDE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_cells_run(interpreter, tmp_path):
    cells = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    code = "\n".join(cells)
    assert len(cells) == 4 and code.count('".venv-vllm/bin/python"') == 1
    code = code.replace('".venv-vllm/bin/python"', repr(interpreter))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rollout/logprob_gap" in done.stdout and (tmp_path / "runs/vllm/export/config.json").exists()
