"""A Hub on the loopback address: the few HTTP calls that a push and a download make, kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse


class LoopbackHub(ThreadingHTTPServer):
    """Repositories by id: each a mapping of path to bytes; and the token that every writer must show."""

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.repos: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def sha(self, repo: str) -> str:
        listing = sorted((path, hashlib.sha1(content).hexdigest()) for path, content in self.repos[repo].items())
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()


@contextmanager
def loopback_hub(token: str) -> Iterator[LoopbackHub]:
    server = LoopbackHub(token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any = b"", status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        path, body = unquote(urlparse(self.path).path), self._body()
        if self.headers.get("Authorization") not in (f"Bearer {self.server.token}",) and "/verify" not in path:
            return self._answer({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.server.repos.setdefault(repo, {})
            return self._answer({"url": f"{self.server.address}/{repo}", "name": repo})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None}
                for f in files
            ]  # fmt: skip
            return self._answer({"files": modes})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.server.address}/lfs/{o['oid']}"},
                                  "verify": {"href": f"{self.server.address}/lfs/verify"}}}
                for o in json.loads(body)["objects"]
            ]  # fmt: skip
            return self._answer({"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
        if path == "/lfs/verify":
            asked = json.loads(body)
            good = len(self.server.blobs.get(asked["oid"], b"")) == asked["size"]
            return self._answer({}, 200 if good else 404)
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            repo = match[1]
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.server.repos[repo][value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    self.server.repos[repo][value["path"]] = self.server.blobs[value["oid"]]
            sha = self.server.sha(repo)
            return self._answer({"commitUrl": f"{self.server.address}/{repo}/commit/{sha}", "commitOid": sha})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        return self._answer({"error": f"unknown call {path}"}, 404)

    def do_PUT(self) -> None:
        content = self._body()
        oid = urlparse(self.path).path.rsplit("/", 1)[-1]
        if hashlib.sha256(content).hexdigest() != oid:
            return self._answer(status=400)
        self.server.blobs[oid] = content
        return self._answer()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        for repo, files in self.server.repos.items():
            sha = self.server.sha(repo)
            if re.fullmatch(rf"/api/models/{repo}(/revision/[^/]+)?", path):
                listing = [{"rfilename": name} for name in files]
                return self._answer({"id": repo, "modelId": repo, "sha": sha, "siblings": listing, "tags": []})
            if re.match(rf"/api/models/{repo}/tree/", path):
                listing = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                return self._answer(listing)
            if match := re.fullmatch(rf"/{repo}/resolve/[^/]+/(.+)", path):
                if match[1] not in files:
                    return self._answer(status=404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
                content = files[match[1]]
                etag = hashlib.sha256(content).hexdigest()
                return self._answer(content, X_Repo_Commit=sha, ETag=f'"{etag}"')
        return self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET
