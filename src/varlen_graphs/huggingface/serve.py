"""`python -m varlen_graphs serve`: the server of transformers, with the models that it loads wrapped."""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from varlen_graphs.capture.mode import BackendName
from varlen_graphs.encoder import GraphedEncoder
from varlen_graphs.huggingface.wrap import encoders, unwrap, wrap
from varlen_graphs.options.capture import Capture
from varlen_graphs.stats import prometheus


class ServerError(RuntimeError):
    """The installed transformers has no server that can be started with its models wrapped."""


def run_serve(arguments: Sequence[str], backend: BackendName) -> int:
    """Run `transformers serve` with these arguments, and return the exit status.

    Every model that the server loads is wrapped before its first request, and its graphs are captured in the
    background: a request waits for one at most. A model without a tower that can be graphed is served as it is, and the
    reason printed. `GET /metrics` shows the counters of all loaded towers to Prometheus. It replaces a class and a
    function of transformers in this process, which does nothing else.

    Args:
        arguments: Arguments of `transformers serve`.
        backend: `"cuda"` or `"tape"`, as for `GraphedEncoder`. With `"cuda"`, models on other devices stay as they are.

    Raises:
        ImportError: transformers, or what its server needs, is not installed.
        ServerError: The server of this transformers loads models in another way.
    """
    import transformers.cli.serving.model_manager as managers
    import transformers.cli.serving.server as servers
    from fastapi.responses import PlainTextResponse
    from transformers.cli.transformers import main

    if not hasattr(managers.ModelManager, "_load_model"):
        raise ServerError("the server of this transformers loads models in another way: expected transformers 5.23")

    graphed: dict[str, weakref.ref[GraphedEncoder]] = {}  # by the names that metrics have for them
    build: Callable[..., Any] = servers.build_server

    class GraphedModels(managers.ModelManager):
        def _load_model(self, name: str, *args: Any, gguf_file: str | None = None, **options: Any) -> nn.Module:
            model: nn.Module = super()._load_model(name, *args, gguf_file=gguf_file, **options)
            own = name if gguf_file is None else f"{name}:{gguf_file}"  # as the manager tells models apart
            for label, encoder in wrap_loaded(model, backend, own).items():
                graphed[label] = weakref.ref(encoder)  # another one if the model was loaded before
            return model

    def build_with_metrics(*args: Any, **options: Any) -> Any:
        app = build(*args, **options)

        def metrics() -> PlainTextResponse:
            living = ((label, encoder()) for label, encoder in graphed.copy().items())
            return PlainTextResponse(prometheus({label: one for label, one in living if one is not None}))

        app.add_api_route("/metrics", metrics)
        return app

    managers.ModelManager = GraphedModels
    servers.build_server = build_with_metrics
    sys.argv = ["transformers", "serve", *arguments]
    main()
    return 0


def wrap_loaded(model: nn.Module, backend: BackendName, name: str = "") -> dict[str, GraphedEncoder]:
    """Wrap a model, and capture its graphs in the background; print what was understood, or why it stays as it is.

    Args:
        model: The model.
        backend: As for `run_serve`.
        name: Tells it from other models of its class.

    Returns:
        Its encoders, by names for the label `encoder` of their metrics.
    """
    kind = type(model).__name__
    try:
        device = next((parameter.device for parameter in model.parameters()), None)
        if backend == "cuda" and (device is None or device.type != "cuda"):
            raise ServerError(f"its weights are on {device}, graphs of CUDA are for GPUs; try --backend tape on a CPU")
        found = encoders(wrap(model, backend=backend, capture=Capture(lazy=True)))
        found.capture_in_background()
        print(f"varlen_graphs: {found.report()}", file=sys.stderr)
    except Exception as error:  # whatever it is, the model can be served
        unwrap(model)
        print(f"varlen_graphs: {kind} is served as it is: {error}", file=sys.stderr)
        return {}
    return {" ".join(filter(None, (name, kind, path))): one for path, one in found.items()}
