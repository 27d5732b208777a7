"""A model by its name: what is ours, a folder, a hub; and which group sizes it can be quantized in."""

import http.server
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from labkit.models import ModelMissing, build_tiny, check_group_size, load_model, model_path
from labkit.models.hub import read_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("hub") / "tiny")


@pytest.fixture
def hub(folder, monkeypatch, tmp_path):
    """A hub on this machine with one model, camp/tiny; gives the list of the files that were fetched from it."""
    fetched: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body: bool):
            file = folder / self.path.rpartition("/")[2]
            if self.path.startswith("/api/models/camp/tiny/revision/main"):
                names = [{"rfilename": name} for name in [*os.listdir(folder), "pytorch_model.bin"]]
                content = json.dumps({"id": "camp/tiny", "sha": COMMIT, "siblings": names}).encode()
            elif self.path.startswith(f"/api/models/camp/tiny/tree/{COMMIT}"):
                sizes = {name: (folder / name).stat().st_size for name in os.listdir(folder)} | {"pytorch_model.bin": 1}
                rows = [{"type": "file", "oid": name, "path": name, "size": size} for name, size in sizes.items()]
                content = json.dumps(rows).encode()
            elif self.path.startswith(f"/camp/tiny/resolve/{COMMIT}/") and file.is_file():
                content = file.read_bytes()
                fetched.extend([file.name] if body else [])
            else:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{file.name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return self.wfile.write(content) if body else None

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield fetched
    server.shutdown()
    server.server_close()


def test_a_model_comes_from_a_hub_once_and_then_loads_with_the_hub_gone(hub, folder, monkeypatch, capfd):
    path = model_path("camp/tiny", progress=False)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub) and "pytorch_model.bin" not in hub
    assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    model, tokenizer = load_model("camp/tiny")
    assert model.dtype == torch.float32 and not model.training and tokenizer("for x").input_ids
    assert capfd.readouterr().err == "", "what is written to stderr costs a graded cell its points"


def test_what_is_not_to_be_had_is_named_with_what_there_is():
    with pytest.raises(ModelMissing, match="no model 'smollm': give arithmetic, smollm2, tiny-qwen3"):
        model_path("smollm")
    with pytest.raises(ModelMissing, match=r"no model '\./nowhere': give"):
        model_path("./nowhere")


def test_a_folder_without_a_llama_or_qwen_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be the folder of a model, with a config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match=r"must hold one of LlamaForCausalLM.*, and holds GPT2LMHeadModel"):
        load_model(str(tmp_path))


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
QWEN2_5_0_5B = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}
QWEN3_0_6B = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "fits"), [(SMOLLM2, (64, 192, 32, -1)), (QWEN2_5_0_5B, (128, 64)), (QWEN3_0_6B, (128, 1024))]
)
def test_group_sizes_that_divide_every_dimension_pass(config, fits):
    for group_size in fits:
        check_group_size(config, group_size)


def test_a_group_size_that_does_not_divide_is_refused_with_the_reason_and_one_that_does():
    with pytest.raises(ValueError, match=r"group_size 128 does not divide hidden_size 576 = 4 \* 128 \+ 64") as error:
        check_group_size(SMOLLM2, 128)
    assert "Here 64 fits (any divisor of 192 does)" in str(error.value) and "intermediate" not in str(error.value)
    with pytest.raises(ValueError, match=r"heads \* head_dim 1600 = 12 \* 128 \+ 64: a last group"):
        check_group_size(QWEN3_0_6B | {"head_dim": 100}, 128)
    with pytest.raises(ValueError, match="must be positive, or -1 for whole rows, and is 0"):
        check_group_size(SMOLLM2, 0)


def test_the_group_size_is_asked_before_weights_are_read(folder, monkeypatch):
    import transformers

    def no_weights(*args, **kwargs):
        raise AssertionError("the weights were read first")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_weights)
    with pytest.raises(ValueError, match="group_size 96 does not divide"):
        load_model(str(folder), group_size=96)
    assert read_config(folder)["hidden_size"] == 256
