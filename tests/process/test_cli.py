"""The commands that look at, check and move checkpoints, as real processes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import forked

np = pytest.importorskip("numpy")

TRAINER = """
import sys, torch, zerostall
where, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
model[1].weight = model[0].weight
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
counters = {"epoch": 0, "note": "it's [bold]fine[/bold]"}
with zerostall.Checkpointer(where, run="tour", model=model, optimizer=optimizer, counters=counters) as ckpt:
    if sys.argv[3:] == ["restore"]:
        print(ckpt.restore(only="model.*"), model[1].weight.sum().item(), model[0].weight is model[1].weight)
    for step in range(steps):
        model(torch.arange(9)).sum().backward()
        optimizer.step()
        counters["epoch"] = step
        ckpt.save(step + 1, metric=1 / (step + 1)).wait("disk")
"""


def cli(environment: dict[str, str], *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    return checked(forked.cli(environment, *arguments), code)


def cli_anew(environment: dict[str, str], *arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The same with an interpreter that starts from nothing, for what happens then."""
    command = [sys.executable, "-m", "zerostall.cli", *map(str, arguments)]
    return checked(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100), code)


def checked(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def document(environment: dict[str, str], *arguments: str | Path, code: int = 0) -> dict:
    """The one JSON document a command prints; nothing else may be on standard output."""
    return json.loads(cli(environment, *arguments, "--json", code=code).stdout)


def train(environment: dict[str, str], where: Path, steps: int, *more: str) -> str:
    return checked(forked.python("-c", TRAINER, where, steps, *more, environment=environment), 0).stdout


def image(where: Path, step: int) -> Path:
    return where / f"step-{step:012d}" / "rank-00000.safetensors"


def small_run(environment: dict[str, str], folder: Path, names: tuple[str, ...] = ("w", "b")) -> Path:
    """Steps 1 and 2 of a run that came from safetensors files."""
    for step in (1, 2):
        save_file({name: np.full((2, 3), step, np.float32) for name in names}, folder / "in.safetensors")
        cli(environment, "import", folder / "in.safetensors", folder / "run", "--step", step)
    return folder / "run"


def test_a_tour_of_a_trained_run(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(agent_environment, run, 3)

    listing = document(agent_environment, "ls", run)
    assert (listing["where"], listing["name"], listing["set_aside"]) == (str(run), "tour", [])
    rows = listing["snapshots"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["clean"] and "disk" in row["tiers"] and row["world"] == 1 for row in rows)
    assert "host" in rows[-1]["tiers"] and rows[1]["metric"] == 0.5
    assert cli(agent_environment, "ls", run).stdout.splitlines()[0].split() == "step saved size metric in state".split()

    shown = document(agent_environment, "show", run, 3)
    assert (shown["step"], shown["tiers"], shown["name"]) == (3, ["disk", "host"], "tour")
    (rank,) = shown["ranks"]
    tensors = {tensor["name"]: tensor for tensor in rank["tensors"]}
    assert tensors["model.0.weight"] | {"offset": 0} == {
        "name": "model.0.weight",
        "dtype": "float32",
        "shape": [9, 4],
        "nbytes": 144,
        "alias_of": None,
        "offset": 0,
    }
    assert tensors["model.1.weight"]["alias_of"] == "model.0.weight"
    found = {value["name"]: value["text"] for value in rank["values"]}
    assert found["counters.epoch"] == "2" and "[bold]fine[/bold]" in found["counters.note"]
    text = cli(agent_environment, "show", run, "--only", "model.*", "--only", "counters.*").stdout
    assert "model.1.weight → model.0.weight" in text and "[bold]fine[/bold]" in text and "exp_avg" not in text

    difference = document(agent_environment, "diff", run, 1, 3)
    assert not difference["same"] and {row["name"] for row in difference["values"]} == {"counters.epoch"}
    assert "model.0.weight" in {row["name"] for row in difference["changed"]}
    assert "same, bit for bit" in cli(agent_environment, "diff", run, 2, 2).stdout

    assert document(agent_environment, "verify", run)["clean"]
    assert document(agent_environment, "pin", run, 1) == {"where": str(run), "step": 1, "pinned": True}
    train(agent_environment, run, 0)
    assert document(agent_environment, "ls", run)["snapshots"][0]["pinned"]
    cli(agent_environment, "unpin", run, 1)
    assert not document(agent_environment, "ls", run)["snapshots"][0]["pinned"]

    cli(agent_environment, "agent", "stop")
    assert all(row["tiers"] == ["disk"] for row in document(agent_environment, "ls", run)["snapshots"])


def test_out_to_a_file_and_back_into_training(agent_environment: dict[str, str], tmp_path: Path) -> None:
    train(agent_environment, tmp_path / "run", 2)
    out = tmp_path / "out.safetensors"
    done = document(agent_environment, "export", tmp_path / "run", 2, out, "--root", "model")
    assert (done["path"], done["step"], done["tensors"], done["aliases"]) == (str(out), 2, 1, {"1.weight": "0.weight"})
    total = float(load_file(out)["0.weight"].sum(dtype=np.float32))
    cli(agent_environment, "export", tmp_path / "run", 2, tmp_path / "out.pt")
    for name, step in (("newest", ["newest"]), ("none", [])):
        said = document(agent_environment, "export", tmp_path / "run", *step, tmp_path / f"{name}.safetensors")
        assert said["step"] == document(agent_environment, "show", tmp_path / "run", *step)["step"]

    for name, options in (("out.safetensors", ()), ("out.pt", ("--key", "model"))):
        fresh = tmp_path / f"from-{name}"
        done = document(agent_environment, "import", tmp_path / name, fresh, "--step", 7, "--run", "tour", *options)
        assert (done["where"], done["step"], done["tensors"], done["aliases"]) == (str(fresh), 7, 1, 1)
        step, restored, tied = train(agent_environment, fresh, 0, "restore").split()
        assert (step, tied) == ("7", "True") and float(restored) == pytest.approx(total, rel=1e-5)


def test_damage_is_exit_status_1_and_says_where(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path)
    data = bytearray(image(run, 2).read_bytes())
    data[-1] ^= 1
    image(run, 2).write_bytes(data)
    found = document(agent_environment, "verify", run, code=1)
    assert [row["clean"] for row in found["steps"]] == [True, False] and not found["clean"]
    text = cli(agent_environment, "verify", run, code=1).stdout
    assert "damaged" in text and str(image(run, 2)) in text
    cli(agent_environment, "verify", run, 1)
    for command in (("export", run, 2, tmp_path / "o.safetensors"), ("diff", run, 1, 2)):
        done = cli(agent_environment, *command, code=1)
        assert done.stderr.startswith("CorruptError: ") and done.stdout == ""
    assert not (tmp_path / "o.safetensors").exists()

    image(run, 1).with_name("manifest.json").write_bytes(b"{")
    listing = document(agent_environment, "ls", run)
    assert not listing["snapshots"][0]["clean"] and "cut off" in listing["snapshots"][0]["reason"]
    assert "step 1 is damaged:" in cli(agent_environment, "ls", run).stdout
    assert cli(agent_environment, "show", run, 1, code=1).stderr.startswith("CorruptError: ")


def test_errors_say_what_and_usage_errors_are_2(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    cases: list[tuple[int, str, tuple[str | Path, ...]]] = [
        (1, "does not exist", ("ls", tmp_path / "nowhere")),
        (1, "does not exist", ("verify", tmp_path / "nowhere", "--json")),
        (1, "nothing is saved", ("verify", tmp_path / "empty")),
        (1, "steps there: 1, 2", ("show", run, 3)),
        (1, "no clean step", ("show", tmp_path / "empty")),
        (1, "hint: choose another name", ("export", run, 1, tmp_path / "bad.safetensors")),
        (1, "is in", ("import", tmp_path / "in.safetensors", run, "--step", 2, "--json")),
        (1, "bad.safetensors: a header", ("import", tmp_path / "bad.safetensors", run, "--step", 5)),
        (1, "no step 9", ("pin", run, 9)),
        (2, "names begin with model", ("export", run, 1, tmp_path / "o.safetensors", "--root", "x")),
        (2, "neither a number of steps nor 'newest'", ("export", run, "latest", tmp_path / "o.pt")),
        (2, "no file or folder to write it to", ("export", run, "newest")),
        (2, "neither a number of steps nor 'newest'", ("show", run, "latest")),
        (2, "fits no name; names begin with model", ("show", run, "--only", "nope.*")),
        (2, "says no format", ("export", run, 1, tmp_path / "o.txt")),
        (2, "dtype is one of", ("export", run, 1, tmp_path / "o.pt", "--dtype", "int8")),
        (2, "format is one of", ("export", run, 1, tmp_path / "o", "--format", "gguf")),
        (2, "number of bytes", ("export", run, 1, tmp_path / "o", "--shard-size", "big")),
        (2, "OLD=NEW", ("export", run, 1, tmp_path / "o", "--rename", "w")),
        (2, "", ("ls",)),
        *(
            (2, "neither a number of steps nor 'newest'", words)
            for words in (
                ("pin", run, "latest"),
                ("unpin", run, "0x1"),
                ("verify", run, "latest"),
                ("diff", run, 1, "last"),
            )
        ),
        *((1, "no clean step", (word, tmp_path / "empty", "newest")) for word in ("pin", "unpin", "verify")),
        (2, "", ("import", tmp_path / "in.safetensors", run)),
        (2, "", ("frobnicate",)),
    ]
    for code, words, arguments in cases:
        done = cli(agent_environment, *arguments, code=code)
        assert words in done.stderr and done.stdout == "", arguments


def test_every_command_that_takes_a_step_takes_the_newest_clean_one(
    agent_environment: dict[str, str], tmp_path: Path
) -> None:
    run = small_run(agent_environment, tmp_path)
    assert document(agent_environment, "verify", run, "newest")["steps"] == [
        row for row in document(agent_environment, "verify", run)["steps"] if row["step"] == 2
    ]
    found = document(agent_environment, "diff", run, 1, "newest")
    assert (found["a"], found["b"], found["same"]) == (1, 2, False)
    assert document(agent_environment, "diff", run, "newest", 2)["same"]
    assert document(agent_environment, "pin", run, "newest") == {"where": str(run), "step": 2, "pinned": True}
    assert document(agent_environment, "unpin", run, "newest") == {"where": str(run), "step": 2, "pinned": False}
    assert document(agent_environment, "show", run, "newest")["step"] == 2
    image(run, 2).unlink()
    assert document(agent_environment, "pin", run, "newest")["step"] == 1
    assert document(agent_environment, "verify", run, "newest")["clean"]
    for command in cli(agent_environment, "--help").stdout.split():
        if command in ("show", "verify", "diff", "pin", "unpin", "export"):
            assert "newest" in cli(agent_environment, command, "--help").stdout, command


def test_no_command_but_those_on_torch_files_imports_torch(agent_environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = os.pathsep.join([str(tmp_path / "fake"), *filter(None, [agent_environment.get("PYTHONPATH")])])
    environment = {**agent_environment, "PYTHONPATH": path}
    run = small_run(agent_environment, tmp_path)
    again, out = ("import", tmp_path / "in.safetensors", run, "--step", 3), tmp_path / "o.safetensors"
    commands = [
        again,
        ("ls", run),
        ("show", run),
        ("verify", run),
        ("diff", run, 1, 2),
        ("export", run, 1, out),
        ("doctor",),
    ]
    for command in commands:
        cli_anew(environment, *command)


def test_a_folder_of_shards(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path)
    wishes = ("--weights", "--shard-size", "30B", "--rename", "^w$=weight", "--dtype", "bfloat16")
    done = document(agent_environment, "export", run, 2, tmp_path / "hub", *wishes)
    assert (done["tensors"], done["files"], done["path"]) == (2, 2, str(tmp_path / "hub"))
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"weight", "b"} and index["metadata"]["total_size"] == 24
    back = document(
        agent_environment, "import", tmp_path / "hub", run, "--step", 3, "--rename", "weight=w", "--root", "m"
    )
    assert (back["step"], back["tensors"], back["aliases"]) == (3, 2, 0)
    wrong = cli(agent_environment, "import", tmp_path / "hub", run, "--step", 4, "--format", "dcp", code=1)
    assert "holds no .metadata" in wrong.stderr
    text = cli(agent_environment, "export", run, 2, tmp_path / "hub", "--overwrite").stdout
    assert text.endswith(" in 2 files\n")


def test_without_typer_the_command_says_what_to_install(agent_environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [agent_environment.get("PYTHONPATH")])])
    done = cli_anew({**agent_environment, "PYTHONPATH": path}, "ls", code=2)
    assert "pip install 'zerostall[cli]'" in done.stderr


def test_names_cannot_steer_the_terminal(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path, ("\x1b[31mred\u202e", "[red]w[/red]", "line\nbreak"))
    for command in (("show", run), ("diff", run, 1, 2)):
        output = cli(agent_environment, *command).stdout
        assert "\x1b" not in output and "\u202e" not in output and "red" in output and "line\\nbreak" in output


def on_terminal(environment: dict[str, str], *arguments: str | Path, columns: int = 80) -> str:
    """What a command writes on a terminal of that width."""
    ours, theirs = pty.openpty()
    settings = {**environment, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "zerostall.cli", *map(str, arguments)]
    with subprocess.Popen(command, env=settings, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        output = b""
        try:
            while piece := os.read(ours, 1 << 16):
                output += piece
        except OSError:  # the last one to hold the terminal has left
            pass
        os.close(ours)
    assert process.returncode == 0, output
    return output.decode()


def test_a_terminal_gets_colour_and_lines_that_fit(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path, ("a.very.long.name." * 7 + "weight", "b"))
    for command in (("ls", run), ("show", run, 1), ("verify", run), ("diff", run, 1, 2), ("doctor",)):
        output = on_terminal(agent_environment, *command)
        assert "\x1b[" in output
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r", "\n").splitlines()
        assert max(map(len, lines)) <= 80, command
        assert "weight" in re.sub(r"\s", "", "".join(lines)) or command[0] in ("ls", "verify", "doctor")


def test_a_terminal_gets_a_bar_for_what_may_take_long(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path)
    for what, command in (
        ("verifying", ("verify", run)),
        ("comparing", ("diff", run, "1", "2")),
        ("exporting", ("export", run, "2", tmp_path / "o.safetensors")),
        ("importing", ("import", tmp_path / "in.safetensors", run, "--step", "3")),
    ):
        shown = on_terminal(agent_environment, *command)
        assert what in shown and "\u2501" in shown, command
    assert "verifying" not in on_terminal(agent_environment, "verify", run, "--json")


def test_a_reader_that_leaves_is_no_error(agent_environment: dict[str, str], tmp_path: Path) -> None:
    run = small_run(agent_environment, tmp_path, tuple(f"w{n}" for n in range(3000)))
    command = [sys.executable, "-m", "zerostall.cli", "show", str(run)]
    process = subprocess.Popen(command, env=agent_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert errors == b""
