# One image for every process of the loop: `docker build -t headrace .`, then `docker compose --profile loop up`.
FROM python:3.11.14-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/headrace
COPY requirements.lock ./
RUN python -m pip install --require-hashes --no-deps -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY producers producers
COPY consumers consumers
COPY streams streams
COPY trainer trainer
COPY inference inference
COPY kernels kernels
COPY envs envs
RUN python -m pip install --no-deps . \
    && useradd --create-home --uid 10001 headrace \
    && install -d -o headrace /var/lib/headrace
USER headrace
WORKDIR /var/lib/headrace
STOPSIGNAL SIGTERM
ENTRYPOINT ["headrace"]
CMD ["--help"]
