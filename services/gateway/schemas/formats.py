"""Expressions of the string formats that are enforced. Each matches only valid texts."""

_MONTH_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DATE = f"[0-9]{{4}}-{_MONTH_DAY}|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NAME = "[a-zA-Z0-9_+-]{1,24}"
_DOMAIN = r"([a-z0-9]{1,30}\.){1,3}[a-z]{2,10}"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}{_ZONE}$",
    "date-time": f"^{_DATE}T{_TIME}{_ZONE}$",
    "uuid": "^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "email": rf"^{_NAME}(\.{_NAME})?@{_DOMAIN}$",
}
