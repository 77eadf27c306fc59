#!/bin/bash
set -e
cat > gateway.json <<'JSON'
{
  "name": "gateway",
  "listen": {
    "host": "0.0.0.0",
    "port": 8443
  },
  "routes": [
    {
      "path": "/api",
      "target": "http://api.internal:9000",
      "retries": 3
    },
    {
      "path": "/static//",
      "target": "file:///srv/static",
      "cache": true
    }
  ],
  "motd": "Don't panic // it's fine",
  "limits": {
    "body": 1048576,
    "header": 8192,
    "ratio": 0.5
  },
  "pattern": "^\\w+$",
  "owner": null
}
JSON
