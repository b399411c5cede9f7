"""The README says what the code does: option tables, examples, flags, files and pictures."""

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from moe import MoEConfig, TransformerConfig
from moe.arguments import field_comments, flag_of
from moe.quantization.recipes import RECIPES
from router.config import BALANCING_TYPES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def choices_of(hint, name):
    """Return the values that a field of a few values takes."""
    if name == "moe_router_load_balancing_type":
        return list(BALANCING_TYPES)
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [value for part in typing.get_args(hint) for value in choices_of(part, "")]


def option_row(config_class, field):
    """Return the line of the options table that describes a field."""
    default = "required"
    if field.default is not dataclasses.MISSING:
        default = f'`"{field.default}"`' if isinstance(field.default, str) else f"`{field.default}`"
    flag = f"`{flag_of(field.name)}`"
    if field.name == "params_dtype":
        flag = "`--bf16`, `--fp16`, `--fp64`"
    elif field.default is True:
        flag += ", `--no-...`"
    meaning = field_comments(config_class)[field.name].replace("|", "\\|")
    if choices := choices_of(typing.get_type_hints(config_class)[field.name], field.name):
        meaning += f" ({', '.join(choices)})"
    return f"| `{field.name}` | {flag} | {default} | {meaning} |"


def recipe_row(name, recipe):
    """Return the line of the table of recipes that describes one."""
    formats, bits = (
        "E2M1" if recipe.bits == 4 else "E4M3",
        "stochastic rounding" if recipe.bits == 4 else "hybrid: E5M2",
    )
    scales = {"e4m3": "E4M3 under an fp32 scale of the tensor", "e8m0": "E8M0", "pow2": "fp32, powers of two"}
    scale = scales.get(recipe.scale_format, "fp32") + (", of earlier steps" if recipe.has_history else "")
    torch_hardware = "-" if recipe.torch_capability is None else f"sm{10 * recipe.torch_capability}"
    te_hardware = "-" if recipe.te_capability is None else "sm{}{}+".format(*recipe.te_capability)
    cells = [f"**{name}**", formats, bits, recipe.block, recipe.weight_block, scale, recipe.row_multiple]
    cells += [recipe.width_multiple, torch_hardware, te_hardware]
    return f"| {' | '.join(map(str, cells))} |"


def test_the_table_of_recipes_is_the_code_s():
    missing = [row for row in (recipe_row(name, recipe) for name, recipe in RECIPES.items()) if row not in README]
    assert not missing, "README.md lacks these rows:\n" + "\n".join(missing)


@pytest.mark.parametrize("config_class", [MoEConfig, TransformerConfig])
def test_option_tables_describe_every_field(config_class):
    rows = [option_row(config_class, field) for field in dataclasses.fields(config_class)]
    missing = [row for row in rows if row not in README.splitlines()]
    assert not missing, "README.md lacks these rows:\n" + "\n".join(missing)


def test_option_tables_have_no_other_fields():
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == known


def test_smallest_example_runs():
    example = next(code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if "randn" in code)
    result = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "8 experts of width 128, top-2" in result.stdout


def test_every_flag_exists():
    help_text = "".join(
        subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        ).stdout
        for command in (["examples/pretrain_gpt.py"], ["-m", "moe.plan"], ["benchmarks/layer.py"])
    )
    torchrun = {"--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--standalone"}
    torchrun |= {"--max-restarts"}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", README)) - torchrun
    assert used, "the pattern finds no flag"
    assert {flag for flag in used if flag not in help_text} == set()


def test_files_and_pictures_exist():
    tree = README.split("## Files, in reading order")[1].split("```")[1]
    folder, listed = "", []
    for line in tree.strip().splitlines():
        names = [word for word in line.split("  ")[0 if not line.startswith(" ") else 1].split() if word]
        for name in names:
            if name.endswith("/"):
                folder = name
                listed.append(name)
            else:
                listed.append(name if "/" in name and not line.startswith(" ") else folder + name)
    assert len(listed) > 20
    assert [name for name in listed if not (ROOT / name).exists()] == []
    pictures = re.findall(r"\]\((docs/[^)]+)\)", README)
    assert len(pictures) >= 4
    assert [name for name in pictures if not (ROOT / name).is_file()] == []


def test_no_placeholder_is_left():
    assert not re.search(r"\b(TODO|TRAIN_OUTPUT|MEASURED|OPTIONS\d)\b", README)
