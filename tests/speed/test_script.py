"""Reading a training script for levers it leaves unused; it is never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from salience.cli import main
from salience.errors import ConfigError
from salience.speed.script import unused_levers

PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader

raise SystemExit("nobody runs this")
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in DataLoader(data, 32, shuffle=True):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
"""


def names(text: str) -> set[str]:
    return {one.lever for one in unused_levers(text)}


def test_a_plain_script_leaves_all_of_them_unused():
    assert names(PLAIN) == {
        "fused", "num_workers", "pin_memory", "compile", "channels_last", "bf16", "cudnn_benchmark", "tf32", "set_to_none",
    }  # fmt: skip


def test_what_a_script_uses_is_not_named():
    used = PLAIN.replace("AdamW(model.parameters())", "AdamW(model.parameters(), fused=True)")
    used = used.replace("shuffle=True", "num_workers=4, pin_memory=True, persistent_workers=True")
    used = used.replace("set_to_none=False", "").replace("raise SystemExit", "model = torch.compile(model)\nprint")
    used += "\nmodel.to(memory_format=torch.channels_last)\ntorch.backends.cudnn.benchmark = True\n"
    used += "torch.set_float32_matmul_precision('high')\nwith torch.autocast('cuda'): pass\n"
    assert names(used) == set()


def test_without_a_gpu_in_the_script_levers_of_gpus_are_not_named():
    assert not {"tf32", "cudnn_benchmark", "pin_memory"} & names(PLAIN.replace(".cuda()", ""))


def test_a_script_that_tunes_leaves_the_step_to_it():
    tuned = PLAIN.replace("for x, y", "fast = salience.tune(model, optimizer, loader)\nfor x, y")
    assert names(tuned) == {"num_workers", "pin_memory", "set_to_none"}


def test_options_passed_as_a_dict_are_not_guessed_at():
    assert "num_workers" not in names(PLAIN.replace("shuffle=True", "**options"))


def test_lines_are_those_of_the_script():
    found = {one.lever: one.line for one in unused_levers(PLAIN)}
    assert PLAIN.splitlines()[found["fused"] - 1].startswith("optimizer = ")


def test_the_doctor_prints_them_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    assert main(["doctor", "--run", str(script)]) == 0
    said = capsys.readouterr().out
    assert f"{script}:8: fused (the same up to rounding): AdamW(..., fused=True)" in said
    script.write_text("print('no training')\n")
    assert main(["doctor", "--run", str(script)]) == 0
    assert "No lever" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_an_error_in_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="line 1"):
        unused_levers("for x in")
    assert main(["doctor", "--run", str(tmp_path / "none.py")]) != 0
