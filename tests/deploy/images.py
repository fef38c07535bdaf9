"""Images of Debian's packages: a base, Bridle's own, and a PostgreSQL, put into the daemon once."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BASE = "bridle-test-base"
BRIDLE = "bridle-test"
POSTGRES = "bridle-test-postgres"

POSTGRES_FILE = f"""
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends postgresql \\
  && mkdir -p /var/lib/postgresql/data && chown postgres: /var/lib/postgresql/data \\
  && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/
USER postgres
ENV PGDATA=/var/lib/postgresql/data
COPY start /usr/local/bin/start
ENTRYPOINT ["bash", "/usr/local/bin/start"]
"""
START = """
set -e
if [ ! -e "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --pwfile=<(echo "$POSTGRES_PASSWORD") \\
    --auth-local=trust --auth-host=scram-sha-256
  echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
  pg_ctl --wait -o "-c listen_addresses=" start
  createdb --username="$POSTGRES_USER" "$POSTGRES_DB" 2>/dev/null || true # it may be the user's
  pg_ctl --wait stop
fi
exec postgres -c listen_addresses='*'
"""
"""What the official image does with its three variables."""


def docker(*words: str | Path, within_s: float = 60) -> str:
    """Run `docker`; its stdout."""
    done = subprocess.run(
        ["docker", *words], check=False, capture_output=True, text=True, timeout=within_s
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def make_base() -> None:
    """Import the Debian that `scripts/test-deploy` made, if the daemon does not have it."""
    if docker("images", "-q", BASE):
        return
    pip = "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
    docker("import", "--change", pip, ROOT / ".cache/debian/base.tar", BASE, within_s=300)


def make_bridle() -> None:
    """Build the image by the command of the guide, on our base and under a name of ours."""
    page = (ROOT / "docs" / "guides" / "deploy.md").read_text()
    [line] = re.findall(r"^\$ docker (build -t bridle .+)$", page, re.MULTILINE)
    more = f"--build-arg BASE={BASE} -t {BRIDLE}"
    words = line.replace("-t bridle", more).replace(" deploy/", f" {ROOT}/deploy/").split()
    docker(*words[:-1], ROOT, within_s=900)


def make_postgres(folder: Path) -> None:
    (folder / "Dockerfile").write_text(POSTGRES_FILE)
    (folder / "start").write_text(START)
    docker("build", "-t", POSTGRES, folder, within_s=600)
