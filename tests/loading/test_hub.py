"""Finding a checkpoint's files in directories, the hub's cache, and a fake hub on localhost."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants, hf_api

from nanovllm.errors import CheckpointError
from nanovllm.loading.hub import (
    Checkpoint,
    configured_checkpoint,
    open_checkpoint,
    weight_files,
)
from nanovllm.options.config import Config
from tests.gguf_files import make_gguf
from tests.hub_server import Hub

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 10}
COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def directory(tmp_path):
    """A checkpoint directory with a config."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Disable the network and use an empty cache; return its path."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_to_cache(cache, files, model="org/tiny", revision="main", commit=COMMITS[0]):
    """Lay out `files` as huggingface_hub's cache does."""
    repo = cache / ("models--" + model.replace("/", "--"))
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


# Directories.


@pytest.mark.parametrize("model", ["model", "~/model", "{directory}"])
def test_a_directory(directory, monkeypatch, model):
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    checkpoint = open_checkpoint(model.format(directory=directory))
    assert checkpoint.path.is_absolute()
    assert checkpoint.path == directory.resolve()
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}


@pytest.mark.parametrize("model", ["/no/such/model", "./none", "../none", "~/none/x", "a/b/c"])
def test_a_directory_that_does_not_exist(model):
    with pytest.raises(CheckpointError, match=rf"{re.escape(repr(model))} does not exist"):
        open_checkpoint(model)


def test_a_file_instead_of_a_directory(directory):
    with pytest.raises(CheckpointError, match=r"is a file; give the directory that holds config"):
        open_checkpoint(str(directory / "config.json"))


def test_a_directory_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a model directory: it has no config\.json"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot read"),
        (b"", "cannot read"),
        (b"\xff\xfe", "cannot read"),
        (b'{"a": 1,}', "cannot read"),
        (b"[]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
        (b'{"a":' * 100_000, "nested more than 32 deep"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32 deep"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "it has the key 'vocab_size' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "it has the key 'b' twice"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"a": "' + b"x" * 5_000_000 + b'"}', "has more than 4194304 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_refused(directory, name, content, said):
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(said)) as raised:
        open_checkpoint(str(directory))
    assert str(directory / name) in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ("x", r"got 'x' \(str\)"),
        ([None], r"got None \(NoneType\)"),
        (-5, "got -5"),
        (True, r"got True \(bool\)"),
        (1.0, r"got 1.0 \(float\)"),
        ([[1]], r"got \[1\] \(list\)"),
        (10, "got 10"),
        ([0, 10**400], r"got 10+\.\.\.0+"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_end_of_sequence_ids_that_are_no_tokens(directory, ids, said):
    wrong = {"eos_token_id": ids}
    cases = {
        "generation_config": (CONFIG, wrong),
        "config": ({**CONFIG, **wrong}, {"eos_token_id": 1}),
    }
    for name, (config, generation) in cases.items():
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "generation_config.json").write_text(json.dumps(generation))
        expected = rf"^{name}\.json: eos_token_id must be an integer from 0 to 9, {said}"
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(str(directory))


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 5}, None, {5}),
        ({"eos_token_id": [5, 6]}, None, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8, 7]}, {7, 8}),
        ({"eos_token_id": 5}, {"eos_token_id": None}, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": 0}, {0}),
        ({"eos_token_id": None}, None, set()),
        ({}, None, set()),
    ],
)
def test_end_of_sequence_ids(directory, config, generation_config, expected):
    (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    assert open_checkpoint(str(directory)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("tokenizer.model", True),
        ("vocab.txt", False),
    ],
)
def test_whether_there_is_a_tokenizer(directory, name, expected):
    assert open_checkpoint(str(directory)).tokenizer_path is None
    (directory / name).write_text("{}")
    assert (open_checkpoint(str(directory)).tokenizer_path is not None) is expected


# Files that must not be opened.

JSON_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "special_tokens_map.json", "tiktoken.model")
OPENED = (*JSON_FILES, *TOKENIZER_FILES, "chat_template.jinja", "model.safetensors")


@pytest.fixture
def no_wait():
    """Fail instead of waiting: to open a FIFO waits for a writer for ever."""

    def stop(*_):
        raise AssertionError("waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def open_all(directory):
    return weight_files(open_checkpoint(str(directory)), str(directory))


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize("name", OPENED)
def test_what_is_not_a_file_of_the_directory_is_refused(directory, name):
    path = directory / name
    secret = directory.parent / "secret"
    secret.write_text("{}")
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' is not a regular file"):
        open_all(directory)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' is not a regular file"):
        open_all(directory)
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}' is outside the directory"):
        open_all(directory)


def test_links_inside_the_directory_are_followed(directory):
    (directory / "config.json").rename(directory / "other.json")
    (directory / "config.json").symlink_to("other.json")
    (directory / "weights").touch()
    (directory / "model.safetensors").symlink_to("weights")
    assert open_checkpoint(str(directory)).config == CONFIG
    assert open_all(directory) == [directory / "model.safetensors"]


def test_files_that_nothing_opens_are_not_checked(directory):
    (directory / "model.safetensors").touch()
    os.mkfifo(directory / "trainer_state.json")
    (directory / "tokens").mkdir()
    (directory / "log.txt").symlink_to("/dev/zero")
    assert open_all(directory) == [directory / "model.safetensors"]


def test_a_directory_that_is_itself_a_link(directory):
    (directory / "model.safetensors").touch()
    link = directory.parent / "link"
    link.symlink_to(directory)
    assert open_all(link) == [directory / "model.safetensors"]


def test_a_loop_of_links(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(directory))


def test_a_link_to_weights_that_are_gone(directory):
    (directory / "part.safetensors").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"'part.safetensors' is a link to a missing file"):
        open_all(directory)


def test_a_huge_file_is_not_read(directory):
    with (directory / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # takes no space on the disk
    with pytest.raises(CheckpointError, match=r"'tokenizer.json' has 1099511627776 bytes; at most"):
        open_checkpoint(str(directory))


@pytest.mark.usefixtures("no_wait")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/etc/passwd", "'/etc/passwd' is outside the directory"),
        ("/dev/zero", "'/dev/zero' is outside the directory"),
        ("../secret.safetensors", "'../secret.safetensors' is outside the directory"),
        ("x/../../secret.safetensors", "is outside the directory"),
        ("link.safetensors", "'link.safetensors' is outside the directory"),
        ("fifo.safetensors", "'fifo.safetensors' is not a regular file"),
        ("a\0b", r"cannot open file 'a\x00b'"),
        ("x" * 300, "xxx"),
        ("", "'' is not a regular file"),
    ],
)
def test_an_index_that_names_what_is_no_file_of_the_checkpoint(directory, name, said):
    (directory.parent / "secret.safetensors").touch()
    (directory / "link.safetensors").symlink_to("../secret.safetensors")
    os.mkfifo(directory / "fifo.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"tensor": name}}))
    with pytest.raises(CheckpointError, match=re.escape(said)) as raised:
        local_weights(directory)
    assert len(str(raised.value)) < 600


def test_an_index_of_many_missing_files_names_some(directory):
    (directory / "here.safetensors").touch()
    names = ["here.safetensors", *(f"{i:05}.safetensors" for i in range(1000))]
    weight_map = dict(enumerate(names))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    missing = r"missing: 00000.safetensors, .* 00004.safetensors, and 995 more$"
    with pytest.raises(CheckpointError, match=missing):
        local_weights(directory)


# Weights of a directory.


def local_weights(directory):
    return weight_files(Checkpoint(directory, {}, {}), str(directory))


def test_a_single_file_goes_before_copies_under_other_names(directory):
    for name in ("model.safetensors", "consolidated.safetensors"):
        (directory / name).touch()
    assert local_weights(directory) == [directory / "model.safetensors"]


def test_files_without_an_index_are_all_read_in_order(directory):
    for name in ("part-b.safetensors", "part-a.safetensors", "notes.txt"):
        (directory / name).touch()
    assert [file.name for file in local_weights(directory)] == [
        "part-a.safetensors",
        "part-b.safetensors",
    ]


def test_an_index_names_the_files(directory):
    weight_map = {"x": "two.safetensors", "y": "one.safetensors", "z": "two.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for name in ("one.safetensors", "two.safetensors", "three.safetensors"):
        (directory / name).touch()
    assert [file.name for file in local_weights(directory)] == [
        "one.safetensors",
        "two.safetensors",
    ]


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"x": 3}}'],
)
def test_an_index_that_makes_no_sense(directory, index):
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        local_weights(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "consolidated.pt"])
def test_weights_of_another_kind_are_named_and_refused(directory, name):
    (directory / name).touch()
    with pytest.raises(CheckpointError, match=rf"no \.safetensors weights \(found {name}, which"):
        local_weights(directory)


def test_a_gguf_file_beside_a_config_must_be_named(directory):
    (directory / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give the path of 'model\.gguf' itself"):
        local_weights(directory)


def test_no_weights_at_all(directory):
    with pytest.raises(CheckpointError, match=r'no \.safetensors weights; .*load_format="dummy"'):
        local_weights(directory)


# The hub's cache, without a network.


@pytest.mark.parametrize("model", ["bad id", "org/na me", "-x", "a" * 97, "org/x..y", "model.git"])
def test_an_invalid_hub_id(offline, model):
    with pytest.raises(CheckpointError, match="neither a directory here nor a valid hub id"):
        open_checkpoint(model)


@pytest.mark.parametrize("model", ["x" * 300, "~nobody-of-that-name/model"])
def test_names_that_the_file_system_refuses(offline, model):
    with pytest.raises(CheckpointError, match=re.escape(model)):
        open_checkpoint(model)


def test_offline_with_nothing_cached(offline, monkeypatch):
    with pytest.raises(CheckpointError, match=r"'org/tiny'.* cache; .* with HF_HUB_OFFLINE unset"):
        open_checkpoint("org/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="with TRANSFORMERS_OFFLINE unset, or give a local"):
        open_checkpoint("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=OSError("no route")))
    with pytest.raises(CheckpointError, match="cache; connect once, or give a local directory"):
        open_checkpoint("org/tiny")


def test_the_caches_links_to_its_blobs_are_followed(offline):
    """huggingface_hub keeps files in ../../blobs; other links out of a snapshot are refused."""
    snapshot = add_to_cache(offline, {})
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    files = {"config.json": json.dumps(CONFIG), "model.safetensors": "weights"}
    for name, text in files.items():
        (blobs / f"sha-{name}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/sha-{name}")
    for model in ("org/tiny", str(snapshot)):
        checkpoint = open_checkpoint(model)
        assert checkpoint.config == CONFIG
        assert weight_files(checkpoint, model) == [snapshot / "model.safetensors"]
    (snapshot / "tokenizer.json").symlink_to("../../refs/main")
    with pytest.raises(CheckpointError, match=r"'tokenizer.json' is outside the directory"):
        open_checkpoint("org/tiny")


def test_offline_with_another_revision_cached(offline):
    add_to_cache(offline, {"config.json": json.dumps(CONFIG)})
    with pytest.raises(CheckpointError, match="in the local cache"):
        open_checkpoint("org/tiny", "v2")


def test_offline_with_two_revisions_cached(offline):
    add_to_cache(offline, {"config.json": '{"vocab_size": 1}'})
    add_to_cache(offline, {"config.json": '{"vocab_size": 2}'}, revision="v2", commit=COMMITS[1])
    assert open_checkpoint("org/tiny").config == {"vocab_size": 1}
    assert open_checkpoint("org/tiny", "v2").config == {"vocab_size": 2}
    assert open_checkpoint("org/tiny", COMMITS[1]).config == {"vocab_size": 2}


def test_offline_with_only_the_tokenizer_cached_does_not_ask_for_a_conversion(offline):
    """The weights exist on the hub, but another program downloaded only the tokenizer."""
    add_to_cache(offline, {"config.json": json.dumps(CONFIG), "tokenizer.json": "{}"})
    checkpoint = open_checkpoint("org/tiny")
    with pytest.raises(CheckpointError, match="in the local cache") as raised:
        weight_files(checkpoint, "org/tiny")
    assert "convert" not in str(raised.value)


# A hub on localhost.


@pytest.fixture
def hub():
    """A fake hub with a single-file model in two revisions, a sharded one and a pickled one."""
    single = {
        "config.json": json.dumps({"vocab_size": 1}),
        "generation_config.json": json.dumps({"eos_token_id": [0]}),
        "tokenizer.json": '{"model": {}}',
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "template",
        "model.safetensors": "weights of main",
        "pytorch_model.bin": "pickled",
        "README.md": "text",
        "figure.png": "image",
        ".gitattributes": "",
    }
    second = {
        **single,
        "config.json": json.dumps({"vocab_size": 2}),
        "model.safetensors": "weights of v2",
    }
    weight_map = {"x": "model-1.safetensors", "y": "model-2.safetensors"}
    sharded = {
        "config.json": json.dumps({"vocab_size": 3}),
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}),
        "model-1.safetensors": "first shard",
        "model-2.safetensors": "second shard",
    }
    server = Hub(
        {
            "org/tiny": {
                "refs": {"main": COMMITS[0], "v2": COMMITS[1]},
                "commits": {COMMITS[0]: single, COMMITS[1]: second},
            },
            "org/sharded": {"refs": {"main": "c" * 40}, "commits": {"c" * 40: sharded}},
            "org/pickled": {
                "refs": {"main": "d" * 40},
                "commits": {"d" * 40: {"config.json": "{}", "pytorch_model.bin": "pickled"}},
            },
        }
    )
    with server.running():
        yield server


@pytest.fixture
def client(hub, monkeypatch, tmp_path):
    """Open a model with the fake hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    huggingface_hub.close_session()

    def run(model, revision=None, endpoint=hub.url, offline=False):
        path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + path)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        try:
            checkpoint = open_checkpoint(model, revision)
            files = weight_files(checkpoint, model, revision)
        except CheckpointError as error:
            return {"error": str(error)}
        return {
            "config": checkpoint.config,
            "generation_config": checkpoint.generation_config,
            "has_tokenizer": checkpoint.tokenizer_path is not None,
            "weights": {file.name: file.read_text(errors="replace") for file in files},
            "files": sorted(p.name for p in checkpoint.path.rglob("*") if p.is_file()),
        }

    return run


def test_download_takes_only_what_is_needed(hub, client):
    answer = client("org/tiny")
    assert answer["config"] == {"vocab_size": 1}
    assert answer["generation_config"] == {"eos_token_id": [0]}
    assert answer["has_tokenizer"]
    assert answer["weights"] == {"model.safetensors": "weights of main"}
    needed = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert set(answer["files"]) == needed
    assert sorted(hub.fetched) == sorted((COMMITS[0], name) for name in needed)


@pytest.mark.parametrize("revision", ["v2", COMMITS[1]])
def test_download_honours_the_revision(hub, client, revision):
    answer = client("org/tiny", revision)
    assert answer["config"] == {"vocab_size": 2}
    assert answer["weights"] == {"model.safetensors": "weights of v2"}
    assert {commit for commit, _ in hub.fetched} == {COMMITS[1]}


def test_download_of_shards(client):
    answer = client("org/sharded")
    assert answer["weights"] == {
        "model-1.safetensors": "first shard",
        "model-2.safetensors": "second shard",
    }


def test_downloaded_once_it_opens_again_also_without_the_hub(hub, client):
    answer = client("org/tiny")
    hub.fetched.clear()
    assert client("org/tiny") == answer
    assert client("org/tiny", offline=True) == answer
    assert client("org/tiny", endpoint="http://127.0.0.1:9") == answer
    assert hub.fetched == []


def test_no_hub_and_nothing_cached(client):
    error = client("org/tiny", endpoint="http://127.0.0.1:9")["error"]
    assert error.startswith("cannot get 'org/tiny' from the hub: ")


def test_an_unknown_revision(client):
    assert client("org/tiny", "v3")["error"] == "hub model 'org/tiny' has no revision 'v3'"


@pytest.mark.parametrize("model", ["org/unknown", "unknown"])
def test_an_unknown_model(client, model):
    assert f"{model!r} is neither a directory here nor a model on the hub" in client(model)["error"]


def test_a_model_without_safetensors_is_refused_and_its_pickles_are_not_fetched(hub, client):
    assert "no .safetensors weights" in client("org/pickled")["error"]
    assert [name for _, name in hub.fetched] == ["config.json"]


def test_a_shard_that_the_hub_lost(hub, client):
    del hub.repositories["org/sharded"]["commits"]["c" * 40]["model-2.safetensors"]
    assert "missing: model-2.safetensors" in client("org/sharded")["error"]


def test_a_local_directory_goes_before_a_hub_id_of_the_same_name(hub, client, tmp_path):
    local = tmp_path / "org" / "tiny"
    local.mkdir(parents=True)
    (local / "config.json").write_text('{"vocab_size": 99}')
    (local / "model.safetensors").write_text("local weights")
    answer = client("org/tiny")
    assert answer["config"] == {"vocab_size": 99}
    assert answer["weights"] == {"model.safetensors": "local weights"}
    assert hub.fetched == []
    shutil.rmtree(local)
    assert client("org/tiny")["config"] == {"vocab_size": 1}


@pytest.fixture
def gguf_hub(hub, tmp_path):
    """The fake hub with a repository of one GGUF file and one of two."""
    content = Path(make_gguf(tmp_path / "made", "qwen3", "Q8_0", vocab_size=20)[0]).read_bytes()
    for name, files in {"one": ["x.gguf"], "two": ["a.gguf", "b.gguf"]}.items():
        commit = name[0] * 40
        files = {"README.md": "text", **dict.fromkeys(files, content)}
        hub.repositories[f"org/{name}"] = {"refs": {"main": commit}, "commits": {commit: files}}
    return hub


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/one", "x.gguf"), ("org/one/x.gguf", "x.gguf"), ("org/two/b.gguf", "b.gguf")],
)
def test_a_gguf_file_of_the_hub(gguf_hub, client, model, name):
    found = client(model)
    assert found["config"]["architectures"] == ["Qwen3ForCausalLM"]
    assert list(found["weights"]) == [name]
    assert [file for _, file in gguf_hub.fetched] == [name]
    if model == "org/one":
        assert client(model, offline=True) == found


def test_directories_without_a_config(tmp_path):
    """A file for pictures is no model, and an adapter is named."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "mmproj-F16.gguf").touch()
    (tmp_path / "model-Q8_0.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model-Q8_0.gguf: a GGUF file has at least 24"):
        open_checkpoint(str(tmp_path))
    for file in tmp_path.glob("*.gguf"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has an adapter: .* lora_request"):
        open_checkpoint(str(tmp_path))


def test_a_gguf_file_of_the_hub_by_its_tag(gguf_hub, client):
    files = next(iter(gguf_hub.repositories["org/two"]["commits"].values()))
    files["model-Q8_0.gguf"] = files.pop("a.gguf")
    files["mmproj-q8_0.gguf"] = files["model-Q8_0.gguf"]
    files["model-Q4_K.gguf"] = files["model-Q4_K_M.gguf"] = files.pop("b.gguf")
    found = client("org/two:q8_0")
    assert list(found["weights"]) == ["model-Q8_0.gguf"]
    assert [file for _, file in gguf_hub.fetched] == ["model-Q8_0.gguf"]
    assert client("org/two:Q8_0", offline=True) == found
    assert list(client("org/two:Q4_K")["weights"]) == ["model-Q4_K.gguf"]
    error = client("org/two:Q5_0")["error"]
    assert "hub model 'org/two' has no GGUF file for the tag 'Q5_0'; name a file" in error
    assert "it has mmproj-q8_0.gguf, model-Q4_K.gguf, m" in error


def test_what_reads_pictures_comes_with_a_gguf_file_of_the_hub(hub, client, tmp_path):
    """Of its folder, or of one above it; offline it is the one that is here."""
    content = Path(make_gguf(tmp_path / "made", "llama", vocab_size=20)[0]).read_bytes()
    files = {"x-Q8_0.gguf": content, "q4/x-Q4_0.gguf": content}
    files |= {"mmproj-F16.gguf": b"16", "mmproj-BF16.gguf": b"B16", "b/mmproj-F16.gguf": b"b"}
    hub.repositories["org/sees"] = {"refs": {"main": "e" * 40}, "commits": {"e" * 40: files}}
    client("org/sees:Q8_0")
    hub.fetched.clear()

    def found(model, **options):
        return configured_checkpoint(Config(model, **options)).mmproj

    assert found("org/sees:Q8_0", limit_mm_per_prompt={"image": 0}) is None
    assert hub.fetched == []
    assert found("org/sees:Q8_0").read_bytes() == b"B16"
    assert found("org/sees/q4/x-Q4_0.gguf").read_bytes() == b"B16"
    assert [name for _, name in hub.fetched] == ["mmproj-BF16.gguf"]
    assert found("org/sees:Q8_0", mmproj="org/sees/mmproj-F16.gguf").read_bytes() == b"16"
    client("org/sees:Q8_0", offline=True)
    assert found("org/sees:Q8_0").read_bytes() == b"B16"


def test_gguf_files_of_the_hub_of_which_none_is_named(gguf_hub, client):
    found = client("org/two")["error"]
    assert "org/two holds 2 GGUF files; name one of them, such as org/two/a.gguf: a.g" in found
    assert "has no file 'c.gguf'" in client("org/two/c.gguf")["error"]
    assert gguf_hub.fetched == []


def test_letter_case_does_not_count_in_what_the_cache_has(gguf_hub, client):
    files = next(iter(gguf_hub.repositories["org/two"]["commits"].values()))
    files["model-Q8_0.gguf"] = files.pop("a.gguf")
    found = client("org/two:Q8_0")
    tiny = client("org/tiny")
    gguf_hub.fetched.clear()
    names = ["ORG/two:q8_0", "org/Two/MODEL-q8_0.gguf", "hf.co/Org/Two:Q8_0"]
    names.append("https://huggingface.co/Org/two/blob/main/Model-Q8_0.gguf")
    for offline in (False, True):
        assert [client(name, offline=offline) for name in names] == [found] * len(names)
        assert client("Org/Tiny", offline=offline) == tiny
    assert gguf_hub.fetched == []


def damaged(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("place", [0, -10], ids=["header", "tensors"])
def test_a_file_that_comes_damaged_is_fetched_again(gguf_hub, client, tmp_path, place):
    """The checksum that the hub names is that of the sound file."""
    gguf_hub.flipped["x.gguf"] = [place]
    sound = client("org/one")
    assert "error" not in sound
    assert [name for _, name in gguf_hub.fetched] == ["x.gguf"] * 2
    gguf_hub.damaged.add("x.gguf")
    shutil.rmtree(tmp_path / "home")
    assert "x.gguf of 'org/one' came damaged twice" in client("org/one")["error"]
    assert not [*(tmp_path / "home").rglob("*.gguf")]
    gguf_hub.damaged.clear()
    assert client("org/one") == sound


@pytest.mark.parametrize("place", [0, 60])
def test_a_header_that_is_damaged_in_the_cache_is_fetched_again(gguf_hub, client, tmp_path, place):
    sound = client("org/one")
    (file,) = (tmp_path / "home").rglob("x.gguf")
    blob = file.resolve()
    blob.write_bytes(damaged(blob.read_bytes(), place))
    assert "error" in client(str(file)), "a path is left as it is"
    assert client("org/one") == sound
    assert [name for _, name in gguf_hub.fetched] == ["x.gguf"] * 2


def test_a_file_of_the_cache_that_its_user_edited_is_kept(client, tmp_path):
    client("org/tiny")
    (file,) = (tmp_path / "home").rglob("config.json")
    file.resolve().write_text("{")
    assert "cannot read" in client("org/tiny")["error"]
    assert file.read_text() == "{"


def test_nothing_outside_the_cache_is_deleted(gguf_hub, client, tmp_path):
    """A link of the cache may lead to a file of the user's, with the name of a checksum."""
    client("org/one")
    (file,) = (tmp_path / "home").rglob("x.gguf")
    mine = tmp_path / ("e" * 64)
    mine.write_bytes(b"mine")
    file.unlink()
    file.symlink_to(mine)
    assert "error" in client("org/one")
    assert mine.read_bytes() == b"mine"
