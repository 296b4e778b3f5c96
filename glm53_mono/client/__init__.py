"""SGLang servers as their users see them: requests over HTTP (`http.py`), tokens (`tokens.py`), and starting one
(`process.py`). Nothing here imports SGLang."""
