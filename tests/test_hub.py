"""Hub ids, offline: a hub cache on disk as `huggingface_hub` lays it out, and clear errors for what is not in it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conftest import ORACLE
from manylora import hub
from manylora.engine_args import Settings
from manylora.exceptions import HubError


def put(cache: Path, repository: str, folder: Path) -> None:
    """Put a folder into a hub cache: files are links into blobs/, a ref leads to the snapshot."""
    commit = hashlib.sha1(repository.encode()).hexdigest()
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for name in ("blobs", "refs"):
        (root / name).mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        content = file.read_bytes()
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    cache = tmp_path / "hub"
    put(cache, "tiny/base", ORACLE / "llama" / "base")
    put(cache, "tiny/alpha", ORACLE / "llama" / "adapters" / "alpha")
    put(cache, "tiny-beta", ORACLE / "llama" / "adapters" / "beta")
    return cache


def run(cache: Path, code: str, *arguments: str) -> str:
    """Run code in a process that can reach no hub: huggingface_hub reads its environment once, when it is imported."""
    start = """
        import sys
        from manylora import LLM, AdapterError, LoRARequest, SamplingParams
        from manylora.exceptions import HubError
        settings = dict(enable_lora=True, dtype="float32", kv_cache_memory_bytes=1 << 24, use_tqdm_on_load=False)
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        def tokens(llm, lora):
            return llm.generate([5, 6], greedy, use_tqdm=False, lora_request=lora)[0].outputs[0].token_ids
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_models_and_adapters_load_by_hub_id(cache: Path) -> None:
    out = run(
        cache,
        """
        by_id = LLM("tiny/base", **settings)
        by_path = LLM(sys.argv[1] + "/base", **settings)
        for number, (hub_id, name) in enumerate([("tiny/alpha", "alpha"), ("tiny-beta", "beta")], start=1):
            request = LoRARequest(name, number, hub_id)
            local = LoRARequest(name, number, f"{sys.argv[1]}/adapters/{name}")
            assert tokens(by_id, request) == tokens(by_path, local)
            assert tokens(by_id, request) != tokens(by_id, None)
            assert request.lora_path == hub_id
        by_tokenizer = LLM("tiny/base", tokenizer="tiny/base", **settings)
        assert by_tokenizer.get_tokenizer().encode("The") == by_path.get_tokenizer().encode("The")
        assert "tiny/base" in by_id.llm_engine.core.info().base_names
        elsewhere = LLM("tiny/base", download_dir=sys.argv[2], revision="main", **settings)
        assert tokens(elsewhere, None) == tokens(by_id, None)
        print("equal")
        """,
        str(ORACLE / "llama"),
        str(cache),
    )
    assert out.strip() == "equal"


def test_what_is_not_in_the_cache_is_a_clear_error(cache: Path) -> None:
    out = run(
        cache,
        """
        for make in (
            lambda: LLM("tiny/absent", **settings),
            lambda: LLM("tiny/base", revision="v2", **settings),
            lambda: LLM("tiny/base", tokenizer="tiny/absent", **settings),
            lambda: LLM("tiny/base", **settings).llm_engine.add_lora(LoRARequest("x", 1, "tiny/absent-adapter")),
        ):
            try:
                make()
            except HubError as error:
                print(error)
        """,
    )
    lines = out.splitlines()
    assert len(lines) == 4
    for line, what in zip(lines, ("model `tiny/absent`", "model `tiny/base`", "tokenizer `tiny/absent`",
                                  "adapter `tiny/absent-adapter`"), strict=True):  # fmt: skip
        assert line.startswith(what)
        assert "not in the hub cache" in line
        assert "give a local path" in line


def test_the_hub_cache_is_a_root_of_its_own(cache: Path, tmp_path: Path) -> None:
    # The link leads out of the allowed folder, and the file it leads to is not in the cache either.
    (cache / "models--tiny--alpha" / "escape").mkdir()
    out = run(
        cache,
        """
        llm = LLM("tiny/base", lora_root=sys.argv[1] + "/adapters", **settings)
        assert llm.llm_engine.add_lora(LoRARequest("alpha", 1, "tiny/alpha"))
        assert llm.llm_engine.add_lora(LoRARequest("beta", 2, sys.argv[1] + "/adapters/beta"))
        for outside in (sys.argv[1] + "/base", "/etc", sys.argv[2]):
            try:
                llm.llm_engine.add_lora(LoRARequest("outside", 3, outside))
            except AdapterError as error:
                print(error.kind)
        print(sorted(llm.llm_engine.list_loras()))
        """,
        str(ORACLE / "llama"),
        str(tmp_path),
    )
    assert out.split("\n")[:4] == ["forbidden", "forbidden", "forbidden", "[1, 2]"]


@pytest.mark.parametrize(
    ("path", "local"),
    [("/a/b", True), ("./a", True), ("../a", True), ("~/a", True), ("a/b/c", True), ("a\\b", True),
     ("owner/name", False), ("name", False), ("Qwen/Qwen2.5-0.5B-Instruct", False)],
)  # fmt: skip
def test_paths_and_hub_ids_are_told_apart(path: str, local: bool) -> None:
    assert hub.looks_local(path) is local


def test_hub_arguments_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(repository: str, **arguments: object) -> str:
        calls.append((repository, arguments))
        return str(ORACLE / "llama" / "base")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    settings = Settings(model="some/model", revision="v1", tokenizer="some/tokenizer", tokenizer_revision="v2",
                        hf_token="secret", download_dir="/cache")  # fmt: skip
    native = settings.native()
    assert native["model"] == native["tokenizer"] == str(ORACLE / "llama" / "base")
    assert native["model_names"] == ["some/model"]
    (model, model_arguments), (tokenizer, tokenizer_arguments) = calls
    assert (model, tokenizer) == ("some/model", "some/tokenizer")
    assert (model_arguments["revision"], tokenizer_arguments["revision"]) == ("v1", "v2")
    for arguments in (model_arguments, tokenizer_arguments):
        assert (arguments["token"], arguments["cache_dir"]) == ("secret", "/cache")
    assert "*.safetensors" in model_arguments["allow_patterns"]
    assert "*.safetensors" not in tokenizer_arguments["allow_patterns"]
    assert "original/*" in model_arguments["ignore_patterns"]


def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    class Response:
        status_code = 401
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None

    def raising(kind: type[Exception]):
        def snapshot_download(*_: object, **__: object) -> str:
            error = kind.__new__(kind)
            error.args = ("401",)
            raise error

        return snapshot_download

    for kind, words in (
        (errors.GatedRepoError, "is gated: accept its terms on the hub and give a token"),
        (errors.RepositoryNotFoundError, "not on the hub"),
        (errors.RevisionNotFoundError, "has no revision `v9` on the hub"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached"),
        (errors.HFValidationError, "no valid hub id"),
        (ConnectionError, "could not be fetched from the hub"),
    ):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(kind))
        with pytest.raises(HubError, match=words):
            hub.resolve("owner/name", hub.MODEL_FILES, what="model", revision="v9")
