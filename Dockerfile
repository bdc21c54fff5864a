# One image for both roles: `--target orchestrator` has no torch, `--target worker` has it.
FROM python:3.12-slim AS orchestrator
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY anabranch ./anabranch
RUN pip install --no-cache-dir . && useradd --create-home --uid 1000 anabranch
USER anabranch
WORKDIR /home/anabranch
RUN mkdir -m 0700 run
ENTRYPOINT ["anabranch"]

FROM orchestrator AS worker
USER root
# Without an index of CPU builds pip brings CUDA along: --build-arg PIP_ARGS='--index-url ...' keeps it small.
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} torch
USER anabranch
