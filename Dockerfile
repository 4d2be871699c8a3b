# ds_hf on PyTorch's own image: docker build -t ds_hf . && docker run --gpus all --ipc=host ds_hf ds-hf doctor
# For CPUs: --build-arg BASE=python:3.12-slim.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.9-cudnn9-runtime
FROM ${BASE}

# The C++ library is compiled when ds_hf is installed. What a training writes into a mounted folder belongs to a user and
# not to root; Kubernetes knows by the number alone that it is none.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer

WORKDIR /opt/ds_hf
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY csrc csrc
COPY ds_hf ds_hf
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[adapters]"

USER 10001
WORKDIR /home/trainer
# Fails where the library was not built or an import is missing.
RUN python -c "import ds_hf; from ds_hf.engine.ops import cpu; assert cpu.available() is None"
CMD ["ds-hf", "doctor"]
