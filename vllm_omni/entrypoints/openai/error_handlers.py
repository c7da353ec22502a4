# SPDX-License-Identifier: Apache-2.0
"""Every error leaves the server in OpenAI's shape, with the field at fault in `param`.

vLLM's handlers stay in charge of vLLM's errors; these add what they leave out: this project's
errors, a short message for an invalid body, the router's 404 and 405, and a `param` where vLLM
names the field in the message only. What nobody foresaw is a 500 without internals.
"""

import json
from http import HTTPStatus
from typing import Any

import regex as re
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.headers import add_security_headers
from vllm_omni.entrypoints.openai.middleware import REQUEST_ID_HEADER
from vllm_omni.entrypoints.openai.protocol.chat import OmniChatCompletionRequest
from vllm_omni.errors import (
    FULL,
    OmniClientError,
    OmniError,
    StorageFullError,
    http_status,
)

logger = init_logger(__name__)

_MAX_ERRORS = 5
_MAX_MESSAGE = 2000
_MAX_PARAM = 200
_FIELD_FIRST = re.compile(r"^[`'\"]?(\w+)[`'\"]? (?:must|cannot|contains|should|is not) ")
_WORD = re.compile(r"\w+")
_PROCESSOR_FAILED = re.compile(r"Failed to apply \w+ on data=")
_NO_PLACE = re.compile(r"Failed to apply prompt (replacement|insertion) for mm_items")
_ABOUT_MESSAGES = ("Input length (", "Video doesn't have audio track")
_CLASS = re.compile(r" or (?:an )?(?:instance of \w+|object to extract fields from)")
_MAX_REASON = 300
# A body whose JSON vLLM reads lazily: parts of a message are validated while the prompt is built.
_LAZY_FIELD = "messages"


def error_body(
    message: str, status: int, error_type: str, param: str | None = None, code: Any = None
) -> dict[str, Any]:
    """OpenAI's error object. `code` is the status where there is nothing more exact."""
    message = message[:_MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
    return {
        "error": {
            "message": message,
            "type": error_type,
            "param": param and param[:_MAX_PARAM],
            "code": code if code is not None else int(status),
        }
    }


def omni_error_body(error: OmniError) -> dict[str, Any]:
    """The error object of one of this project's errors."""
    status = http_status(error)
    if isinstance(error, OmniClientError):
        return error_body(error.message, status, error.error_type, error.param, error.code)
    error_type = HTTPStatus(status).phrase.replace(" ", "") + "Error"
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        error_type = "InternalServerError"
    return error_body(sanitize_message(str(error)), status, error_type)


def error_object(error: Exception, request_id: str) -> dict[str, Any]:
    """OpenAI's error object for what has begun already and fails.

    Args:
        error: What nobody foresaw is told without internals; the log has them.
        request_id: Of the request.
    """
    if isinstance(error, OmniError):
        logger.info("%s: %s", request_id, error)
        return omni_error_body(error)
    logger.error("%s failed", request_id, exc_info=error)
    message = f"Internal server error (request {request_id}). The server's log has the details."
    return error_body(message, 500, "InternalServerError")


def error_event(error: Exception, request_id: str) -> str:
    """How a stream of events that has begun says that it failed: OpenAI's error, then the end.

    Args:
        error: See `error_object`.
        request_id: Of the request.
    """
    body = error_object(error, request_id)
    return f"event: error\ndata: {json.dumps(body)}\n\ndata: [DONE]\n\n"


def field_named_in(message: str) -> str | None:
    """The request field that a message of vLLM's is about.

    It is the first word (`top_k must be ...`), or else a word that is unlikely to be anything but
    a field (`... add_generation_prompt ...`).
    """
    fields = OmniChatCompletionRequest.model_fields
    match = _FIELD_FIRST.match(message)
    if match and match[1] in fields:
        return match[1]
    return next((w for w in _WORD.findall(message) if "_" in w and w in fields), None)


def install_error_handlers(app: FastAPI) -> None:
    """Register the handlers on our own application, over vLLM's of the same classes."""
    app.exception_handler(OmniError)(_omni_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_invalid_body)
    app.exception_handler(ValidationError)(_invalid_part)
    app.exception_handler(VLLMError)(_vllm_error)
    app.exception_handler(ValueError)(_client_value_error)
    app.exception_handler(AssertionError)(_lost_media)
    app.exception_handler(OSError)(_os_error)
    app.exception_handler(Exception)(_unforeseen)


async def _omni_error(request: Request, error: OmniError) -> JSONResponse:
    status = http_status(error)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s: %s", _logged(request.url.path), error)
    else:
        logger.info("%s: %d %s", _logged(request.url.path), status, _logged(str(error)))
    return JSONResponse(omni_error_body(error), status)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    phrase = HTTPStatus(error.status_code).phrase
    detail = error.detail
    if detail == phrase:
        detail = f"{request.method} {request.url.path}: {phrase}"
    return JSONResponse(
        error_body(str(detail), error.status_code, phrase),
        error.status_code,
        headers=error.headers,
    )


async def _invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
    details = [e for e in error.errors() if isinstance(e, dict)]
    if not details:
        message = "; ".join(str(e) for e in error.errors()) or "Invalid request"
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE if "Media Type" in message else 400
        return JSONResponse(error_body(message, status, "BadRequestError"), status)
    if details[0]["type"] == "json_invalid":
        reason = details[0]["ctx"]["error"]
        message = f"The body is not valid JSON: {reason} (at character {details[0]['loc'][-1]})."
        return JSONResponse(error_body(message, 400, "BadRequestError"), 400)
    return JSONResponse(_invalid_fields_body(details, error.body), 400)


def validation_error_body(error: ValidationError, part: Any) -> dict[str, Any]:
    """The error object for a part of a body that is not what it should be."""
    details = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
    return _invalid_fields_body(details, part)


def _invalid_fields_body(details: list[dict[str, Any]], body: Any) -> dict[str, Any]:
    details = _deepest([_placed(detail, body) for detail in _likeliest(details)])
    if _param(details[0]) is None:
        return error_body("The body must be a JSON object.", 400, "BadRequestError")
    lines = list(dict.fromkeys(map(_line, details)))
    message = "; ".join(lines[:_MAX_ERRORS])
    if len(lines) > _MAX_ERRORS:
        message += f"; and {len(lines) - _MAX_ERRORS} more"
    return error_body(sanitize_message(message), 400, "BadRequestError", _param(details[0]))


def _likeliest(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a union of classes that all refused, keep what the least unhappy one said."""
    by_class: dict[str | None, list[dict[str, Any]]] = {}
    for detail in details:
        name = next((p for p in detail["loc"] if _is_class(p)), None)
        by_class.setdefault(name, []).append(detail)
    if None in by_class:
        return by_class[None]
    return min(by_class.values(), key=lambda errors: len({_param(e) for e in errors}))


def _deepest(details: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what was tried of a union, keep what came further than another."""
    places = [each["loc"] for each in details]
    return [
        each
        for each in details
        if not any(
            len(p) > len(each["loc"]) and p[: len(each["loc"])] == each["loc"] for p in places
        )
    ]


def _is_class(part: str | int) -> bool:
    return isinstance(part, str) and part[:1].isupper()


def _line(detail: dict[str, Any]) -> str:
    """What one error of pydantic's says, and of which field."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, OmniClientError):
        return cause.message
    return f"{_param(detail)}: {_CLASS.sub('', detail['msg'])}"


def _placed(detail: dict[str, Any], body: Any) -> dict[str, Any]:
    """The same with a place in the body as it came, without pydantic's names of what it tried."""
    loc = detail["loc"]
    if not isinstance(body, dict) or loc[:1] != ("body",):
        return detail
    found, value = ["body"], body
    for part in loc[1:]:
        missing = part == loc[-1] and detail["type"] == "missing"
        if isinstance(value, dict) and (part in value or missing):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        found.append(part)
    return {**detail, "loc": tuple(found)}


def _param(detail: dict[str, Any]) -> str | None:
    """The field of one error of pydantic's, in dotted notation, without names of classes."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, VLLMValidationError):
        return cause.parameter
    if isinstance(cause, OmniClientError):
        return cause.param
    loc = tuple(part for part in detail["loc"] if not _is_class(part))
    param = clean_loc_for_param(loc)
    for place in ("body", "query", "path"):
        param = param.removeprefix(place).removeprefix(".")
    return param or None


async def _invalid_part(request: Request, error: ValidationError) -> JSONResponse:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not _is_class(part))
    message = f"A message of `messages` is invalid at {where!r}: {first['msg']}"
    return JSONResponse(
        error_body(sanitize_message(message), 400, "BadRequestError", _LAZY_FIELD), 400
    )


async def _vllm_error(request: Request, error: VLLMError) -> JSONResponse:
    if not isinstance(error, VLLMClientError):
        return await vllm_error_handler(request, error)
    return _with_param(error)


async def _client_value_error(request: Request, error: ValueError) -> JSONResponse:
    return _with_param(error)


async def _lost_media(request: Request, error: AssertionError) -> JSONResponse:
    """vLLM asserts that a prompt has a place for each of its media: a cut prompt has not."""
    if not _NO_PLACE.match(str(error)):
        raise error
    message = "The prompt has no place for some of its media: it was cut, or its template has none."
    return JSONResponse(error_body(message, 400, "BadRequestError", _LAZY_FIELD), 400)


def _logged(text: str) -> str:
    """What a client wrote, without characters that would command a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


async def _os_error(request: Request, error: OSError) -> JSONResponse:
    """An upload is put down in a file while it is read: there may be no room for it."""
    if error.errno not in FULL:
        raise error
    return await _omni_error(request, StorageFullError("the server's disk is full"))


def _with_param(error: Exception) -> JSONResponse:
    found = create_error_response(error).error
    message = found.message
    if isinstance(error, VLLMValidationError) and error.args:
        message = sanitize_message(str(error.args[0]))  # without the parameter and value again
    param = found.param or field_named_in(message)
    if _PROCESSOR_FAILED.match(message):  # what follows is the client's data
        reason = sanitize_message(str(error.__cause__ or "it cannot be processed"))
        message = f"The model cannot take the media in `messages`: {reason[:_MAX_REASON]}"
        param = _LAZY_FIELD
    elif param is None and message.startswith(_ABOUT_MESSAGES):
        param = _LAZY_FIELD
    return JSONResponse(error_body(message, found.code, found.type, param), found.code)


async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    if create_error_response(error).error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return _with_param(error)  # a template error, by vLLM's classification
    request_id = request.headers.get(REQUEST_ID_HEADER, "-")
    message = f"Internal server error (request {request_id}). The server's log has the details."
    # The server closes the connection after this error; say so, or the client would reuse it.
    reply = JSONResponse(
        error_body(message, 500, "InternalServerError"),
        500,
        headers={"Connection": "close", REQUEST_ID_HEADER: request_id},
    )
    add_security_headers(reply.headers)  # this answer bypasses every middleware
    return reply
