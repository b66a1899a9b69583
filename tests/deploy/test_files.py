"""`baton files`, `baton completion`, and what an installation consists of."""

import ast
import shlex
import subprocess

import pytest

from deploy import cli, completion, files


def test_files_writes_every_file_below_the_folder(tmp_path, capsys):
    target = tmp_path / "new" / "folder"
    assert files.main([str(target)]) == 0
    printed = capsys.readouterr().out.split()
    written = [path for path in target.rglob("*") if path.is_file()]
    assert sorted(printed) == sorted(map(str, written))
    names = {path.relative_to(target).as_posix() for path in written}
    assert {
        "deploy/Dockerfile",
        "deploy/Dockerfile.gpu",
        "deploy/docker-compose.yml",
        "deploy/docker-compose.gpu.yml",
        "deploy/.env.example",
        "deploy/grafana-dashboard.json",
        "deploy/prometheus-rules.yml",
    } <= names
    assert not [name for name in names if name.startswith("deploy/") and ".py" in name]
    for path in written:
        source = files.ROOT / path.relative_to(target)
        assert path.read_bytes() == source.read_bytes()
        assert path.stat().st_mode & 0o111 == source.stat().st_mode & 0o111


def test_files_leaves_out_the_secrets_of_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "deploy").mkdir()
    for name in (*files.SECRETS, ".env.example"):
        (tmp_path / "deploy" / name).write_text("BATON_CLUSTER_SECRET=...")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert [path.name for path in files.packaged_files()] == [".env.example"]


def test_files_replaces_changed_files_only_by_force(tmp_path, capsys):
    assert files.main([str(tmp_path)]) == 0
    assert files.main([str(tmp_path)]) == 0, "equal files are no reason to refuse"
    changed = tmp_path / "deploy" / "prometheus-rules.yml"
    content = changed.read_bytes()
    changed.write_text("mine")
    missing = tmp_path / "deploy" / "Dockerfile"
    missing.unlink()
    capsys.readouterr()
    assert files.main([str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert (output.out, missing.exists()) == ("", False), "nothing is written"
    assert f"{changed} would be replaced" in output.err and "--force" in output.err
    assert files.main([str(tmp_path), "--force"]) == 0
    assert changed.read_bytes() == content and missing.exists()


def test_files_writes_nothing_into_a_folder_in_place_of_a_file(tmp_path, capsys):
    folder = tmp_path / "deploy" / "Dockerfile"
    folder.mkdir(parents=True)
    assert files.main([str(tmp_path), "--force"]) == 1
    assert f"{folder} is a folder, not a file" in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_installation_has_every_package_of_the_repository():
    (folders,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((files.ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "FOLDERS"
    ]
    packages = {path.parent.name for path in files.ROOT.glob("*/__init__.py")}
    assert set(folders) == packages - {"tests", "baton_pd"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "give the folder to write to"), (["file"], "Not a directory: ")],
)
def test_files_names_what_is_wrong(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert files.main(argv) == 1
    assert message in capsys.readouterr().err


# -- completion

# Calls the function that the script has registered for `baton`, as bash does.
_COMPLETE = """
complete_words() {
  COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 )) COMPREPLY=()
  "$function" baton "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[*]}"
}
function=$(complete -p baton | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "baton.bash"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert completion.main(["bash"]) == 0
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pre"], {"prefill"}),
        ([""], set(cli.COMMANDS)),
        (["up", "--disagg"], {"--disaggregate"}),
        (["up", "--disaggregate", ""], {"always", "auto", "never"}),
        (["serve", "--no-enforce"], {"--no-enforce-eager"}),
        (["up", "--decode.role", ""], {"decode", "both"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["serve", "--config", "a-"], {"a-file", "a-folder"}),
        (["serve", "a-"], {"a-file", "a-folder"}),
        (["files", "a-"], {"a-folder"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bash_completes_commands_options_and_values(
    bash_script, words, expected, tmp_path
):
    (tmp_path / "a-file").touch()
    (tmp_path / "a-folder").mkdir()
    line = shlex.join(["complete_words", "baton", *words])
    script = f"source {shlex.quote(str(bash_script))}\n{_COMPLETE}{line}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert set(done.stdout.split()) >= expected, done.stderr
    if words[-1]:
        assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_option_of_every_command_is_in_the_script(shell, capsys):
    assert completion.main([shell]) == 0
    script = capsys.readouterr().out
    for option in ("disaggregate", "prefill.block-size", "nbytes", "force", "model"):
        assert option in script
