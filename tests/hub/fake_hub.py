"""A Hugging Face Hub in one process: enough of it to create, commit to and download a model."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Repositories in memory, on a loopback port of its own.

    Attributes:
        mode: how files are asked for: "regular" (inside the commit) or "lfs" (uploaded before it).
        gate: requests wait for it; clear it for a slow Hub.
        repos: files of each repository, by name.
        commits: the messages of the commits, in order.
        requests: "METHOD path" of every request.
        tokens: bearer tokens that were sent with writes and reads of models.
    """

    def __init__(self, mode: str = "regular") -> None:
        self.mode = mode
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.objects: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Ends it; its port refuses connections from then on."""
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def sha(self, repo: str) -> str:
        """The commit that a repository is at."""
        return hashlib.sha1(repr(sorted(self.repos[repo])).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, code: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _begin(self) -> tuple[str, bytes]:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith(("/api/models/", "/api/repos/")):
            self.hub.tokens.add((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        self.hub.reached.set()
        self.hub.gate.wait()
        return path, body

    def do_POST(self) -> None:
        path, body = self._begin()
        hub = self.hub
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            known = repo in hub.repos
            hub.repos.setdefault(repo, {})
            self._answer(409 if known else 200, {"url": f"{hub.endpoint}/{repo}", "id": repo})
        elif "/preupload/" in path:
            mode = [
                {
                    "path": file["path"],
                    "uploadMode": hub.mode if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": mode})
        elif path.endswith("/info/lfs/objects/batch"):
            actions = [
                {**o, "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": actions})
        elif "/commit/" in path:
            repo = path.removeprefix("/api/models/").split("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                self._apply(hub.repos[repo], line["key"], line["value"])
            url = f"{hub.endpoint}/{repo}/commit/{hub.sha(repo)}"
            self._answer(200, {"commitUrl": url, "commitOid": hub.sha(repo), "success": True})
        else:
            self._answer(404)

    def _apply(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        if key == "header":
            self.hub.commits.append(value["summary"])
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.hub.objects[value["oid"]]

    def do_PUT(self) -> None:
        path, body = self._begin()
        self.hub.objects[path.removeprefix("/lfs/")] = body
        self._answer(200)

    def do_GET(self) -> None:
        path, _ = self._begin()
        hub = self.hub
        for repo, files in hub.repos.items():
            if path.startswith(f"/api/models/{repo}/tree/"):
                tree = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in files.items()
                ]
                return self._answer(200, tree)
            if path.startswith(f"/api/models/{repo}"):
                revision = path.removeprefix(f"/api/models/{repo}").removeprefix("/revision/")
                if revision not in ("", "main", hub.sha(repo)):
                    return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                siblings = [{"rfilename": name} for name in files]
                return self._answer(
                    200, {"id": repo, "modelId": repo, "sha": hub.sha(repo), "siblings": siblings}
                )
            name = path.partition("/resolve/")[2].partition("/")[2]
            if path.startswith(f"/{repo}/resolve/") and name in files:
                etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                return self._answer(
                    200, files[name], {"ETag": etag, "X-Repo-Commit": hub.sha(repo)}
                )
        return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET
