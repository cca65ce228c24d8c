"""Hub ids, offline: a hub cache on disk as `huggingface_hub` lays it out, and clear errors for what is not in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from conftest import ORACLE
from manylora import LLM, AdapterError, LoRARequest, hub
from manylora.engine_args import Settings
from manylora.exceptions import HubError

FIXTURES = Path(__file__).parent / "fixtures"


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


def test_gguf_repositories_load_by_hub_id(cache: Path, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder, names in ((one, ["tiny-Q8_0.gguf", "mmproj-tiny.gguf"]), (several, ["m-Q4_0.gguf", "m-Q8_0.gguf"])):
        folder.mkdir()
        for name in names:
            shutil.copy(FIXTURES / "gguf-models" / ("qwen3.gguf" if "Q4" in name else "llama.gguf"), folder / name)
    put(cache, "tiny/one-GGUF", one)
    put(cache, "tiny/several-GGUF", several)
    out = run(
        cache,
        """
        by_path = LLM(sys.argv[1], **settings)
        ids = ("tiny/one-GGUF", "tiny/several-GGUF:q8_0", "tiny/several-GGUF/m-Q8_0.gguf")
        for hub_id in ids:
            by_id = LLM(hub_id, **settings)
            assert tokens(by_id, None) == tokens(by_path, None)
            repository = "/".join(hub_id.split(":")[0].split("/")[:2])
            assert {hub_id, repository} <= set(by_id.llm_engine.core.info().base_names)
        other = LLM("tiny/several-GGUF:Q4_0", **settings)
        assert tokens(other, None) != tokens(by_path, None)
        for wrong in ("tiny/several-GGUF", "tiny/several-GGUF:Q5_K_M", "tiny/absent-GGUF:Q4_0"):
            try:
                LLM(wrong, **settings)
            except HubError as error:
                print(error)
        """,
        str(FIXTURES / "gguf-models" / "llama.gguf"),
    )
    undecided, unfitting, absent = out.splitlines()
    assert undecided == (
        "model `tiny/several-GGUF` has 2 GGUF files: `m-Q4_0.gguf`, `m-Q8_0.gguf`; say which one, as "
        "`tiny/several-GGUF/m-Q4_0.gguf` or `tiny/several-GGUF:Q4_K_M`"
    )
    assert unfitting.startswith("model `tiny/several-GGUF` has no GGUF file `Q5_K_M`; it has `m-Q4_0.gguf`, ")
    assert absent.startswith("model `tiny/absent-GGUF` is no local folder and not in the hub cache")


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (["README.md", "m.gguf"], None, "m.gguf"),
        (["m.gguf", "mmproj-m-f16.gguf", "m.imatrix.gguf"], None, "m.gguf"),
        (["m-Q4_K.gguf", "m-Q4_K_M.gguf"], "Q4_K", "m-Q4_K.gguf"),
        (["m-Q4_K_S.gguf", "m.Q4_K_M.gguf"], "q4_k_m", "m.Q4_K_M.gguf"),
        (["m-IQ4_XS.gguf", "m-Q4_0.gguf"], "IQ4_XS", "m-IQ4_XS.gguf"),
        (["Q8_0/m.gguf", "Q4_0/m.gguf"], "Q4_0", "Q4_0/m.gguf"),
        (["Q8_0/m.gguf", "Q4_0/m.gguf"], "Q8_0/m.gguf", "Q8_0/m.gguf"),
        (["m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"], "Q4_0", "m-Q4_0.gguf"),
    ],
)  # fmt: skip
def test_one_gguf_file_is_chosen(files: list[str], wanted: str | None, chosen: str) -> None:
    assert hub.choose_gguf("o/n", files, wanted) == chosen


@pytest.mark.parametrize(
    ("files", "wanted", "words"),
    [
        (["README.md"], "Q4_0", "model `o/n` has no GGUF file"),
        (["a-Q4_K_S.gguf", "a-Q4_K_M.gguf"], "Q4_K", "no GGUF file `Q4_K`; it has `a-Q4_K_M.gguf`, `a-Q4_K_S.gguf`"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "has 2 GGUF files that `Q4_0` fits: `a-Q4_0.gguf`, `b-Q4_0.gguf`"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], None, "split into several GGUF files"),
        (["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf", "a-Q4_0.gguf"], "Q8_0", "it has `a-Q"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf", "is one part of a model"),
        (["a.gguf"], "b.gguf", "no GGUF file `b.gguf`; it has `a.gguf`"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_listed(files: list[str], wanted: str | None, words: str) -> None:
    with pytest.raises(HubError) as caught:
        hub.choose_gguf("o/n", files, wanted)
    assert words in str(caught.value)


def test_gguf_ids_and_paths_are_told_apart() -> None:
    for model, repository in (
        ("o/n:Q4_K_M", "o/n"),
        ("o/n-GGUF/n-Q4_0.gguf", "o/n-GGUF"),
        ("o/n/sub/n.gguf", "o/n"),
        ("o/n", "o/n"),
        ("./a/b.gguf", "./a/b.gguf"),
        ("/o/n/file.gguf", "/o/n/file.gguf"),
    ):
        assert hub.repository(model) == repository


def test_pickled_adapters_of_the_hub_are_refused_as_those_of_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched, local = tmp_path / "fetched", tmp_path / "local"
    for folder in (fetched, local):
        folder.mkdir()
        shutil.copy(ORACLE / "llama" / "adapters" / "alpha" / "adapter_config.json", folder)
    (local / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    patterns: list[str] = []

    def snapshot_download(_: str, **arguments: Any) -> str:
        patterns.extend(arguments["allow_patterns"])
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(
        "huggingface_hub.list_repo_files", lambda *_, **__: ["adapter_config.json", "adapter_model.bin"]
    )
    llm = LLM(str(ORACLE / "llama" / "base"), enable_lora=True, dtype="float32", kv_cache_memory_bytes=1 << 24,
              use_tqdm_on_load=False)  # fmt: skip
    refusals = []
    for path in ("owner/pickled", str(local)):
        with pytest.raises(AdapterError) as caught:
            llm.llm_engine.add_lora(LoRARequest("pickled", 1, path))
        refusals.append(caught.value)
    for refusal in refusals:
        assert (refusal.adapter, refusal.keys, refusal.kind) == ("pickled", ["adapter_model.bin"], "invalid")
    assert refusals[0].reason == refusals[1].reason.replace(str(local), "owner/pickled")
    assert not any(pattern.endswith((".bin", "*")) for pattern in patterns), "a pickle is not even fetched"
