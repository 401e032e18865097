"""All that one server is told, gathered from flags, environment and file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.cli.config_file import FileValue, read_config_file
from headrace.cli.deployment_file import deployment_of_file, deployment_of_flags
from headrace.cli.flags import PREFIX, check_names, is_given, load_config, non_defaults
from headrace.core.deployment import Deployment
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig, FleetConfig, GatewayConfig, LogConfig, RouterConfig
from headrace.models.packages import DEFAULT_MODEL

CONFIGS = (EngineConfig, GatewayConfig, RouterConfig, FleetConfig, LogConfig)
# What a `models:` list says for each model instead.
SAID_BY_MODELS = (
    "replicas",
    "prefill",
    "decode",
    "worker_urls",
    "overflow_urls",
    "worker_api_key_env",
    "served_model_name",
    "chat_template",
)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``engine`` is what the deployment's replicas get unless it says otherwise."""

    deployment: Deployment
    engine: EngineConfig
    gateway: GatewayConfig
    router: RouterConfig
    fleet: FleetConfig
    logs: LogConfig
    warnings: list[str] = []

    def changed(self) -> list[str]:
        """``flag value`` of what differs from its default."""
        parts = (self.engine, self.gateway, self.router, self.fleet, self.logs)
        return [line for part in parts for line in non_defaults(part)]


def load_settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Flag beats environment beats file. Raises UsageError on whatever is wrong in any of them."""
    file: dict[str, FileValue] = read_config_file(Path(arguments.config)) if arguments.config else {}
    model, models = file.pop("model", None), file.pop("models", None)
    flags = vars(arguments)
    warnings = check_names(CONFIGS, environment, file, also=("model", "models"))
    engine = load_config(EngineConfig, flags, environment, file)
    gateway = load_config(GatewayConfig, flags, environment, file)
    fleet = load_config(FleetConfig, flags, environment, file)
    if models is not None:
        if model is not None:
            raise UsageError(f"{model.where}: model and models exclude each other", hint="keep one of them")
        _refuse_flags_beside_models(arguments, environment, file, models)
        deployment = deployment_of_file(models, flags, environment, file)
    else:
        if model is not None and not isinstance(model.value, str):
            raise UsageError(f"{model.where}: model needs a text, got {model.value!r}", hint="quote it")
        asked = arguments.model or (model.value if model is not None else None)
        deployment = deployment_of_flags(asked, engine, gateway, fleet, DEFAULT_MODEL)
    return Settings(
        deployment=deployment,
        engine=engine,
        gateway=gateway,
        router=load_config(RouterConfig, flags, environment, file),
        fleet=fleet,
        logs=load_config(LogConfig, flags, environment, file),
        warnings=warnings,
    )


def _refuse_flags_beside_models(
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    file: Mapping[str, FileValue],
    models: FileValue,
) -> None:
    if arguments.model:
        raise UsageError(
            f"{models.where}: the file names its models, and the command line names {arguments.model!r}",
            hint="leave MODEL out, or take it into the file",
        )
    for name in SAID_BY_MODELS:
        if is_given(name, vars(arguments), environment, file):
            flag = "--" + name.replace("_", "-")
            where = file[name].where if name in file else f"{flag} or {PREFIX}{name.upper()}"
            raise UsageError(
                f"{where}: {name} is said for each model, as {models.path} has a list of models",
                hint=f"move it into an entry of models: ({models.where})",
            )
