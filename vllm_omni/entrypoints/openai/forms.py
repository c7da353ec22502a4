# SPDX-License-Identifier: Apache-2.0
"""Multipart bodies: fields as a validated model, files as they are.

OpenAI's clients write a list as repeated `name[]` parts; objects come as JSON in one part. Files
above 1 MB lie in nameless temporary files while a request is read, and go with it.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import pydantic_core
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from vllm_omni.entrypoints.openai.generation.disconnect import ClientGoneError
from vllm_omni.errors import OmniClientError

M = TypeVar("M", bound=BaseModel)

MAX_FILES = 64
MAX_FIELDS = 256
FORM_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Form(Generic[M]):
    """A body.

    Attributes:
        fields: What is no file.
        files: By the part's name, without brackets, in the order they came.
    """

    fields: M
    files: dict[str, list[UploadFile]]


@asynccontextmanager
async def read_form(
    request: Request,
    model: type[M],
    *,
    files: Collection[str],
    objects: Collection[str] = (),
    lists: Collection[str] = (),
    max_field_bytes: int,
) -> AsyncIterator[Form[M]]:
    """A form, as long as its files are needed.

    Args:
        request: Whose body it is.
        model: What its fields are.
        files: Parts that are files.
        objects: Fields that hold JSON.
        lists: Fields that may come more than once.
        max_field_bytes: Largest field that is no file (a data URL may be in it).

    Raises:
        ClientGoneError: The client left.
        OmniClientError: It is no form, or a part is what it should not be; names the part.
        RequestValidationError: A field is wrong.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in FORM_TYPES:
        raise OmniClientError(
            f"The body must be {FORM_TYPES[0]}, not {media_type[:80] or 'of no Content-Type'!r}.",
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "UnsupportedMediaTypeError",
        )
    try:
        form = await request.form(
            max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=max_field_bytes
        )
    except ClientDisconnect:
        raise ClientGoneError from None
    try:
        texts, uploads = _sorted(form, files, lists)
        for name in objects:
            if name in texts:
                texts[name] = _from_json(texts[name], name)
        yield Form(_validated(model, texts), uploads)
    finally:
        await form.close()


def _sorted(
    form: FormData, files: Collection[str], lists: Collection[str]
) -> tuple[dict[str, Any], dict[str, list[UploadFile]]]:
    texts: dict[str, Any] = {}
    uploads: dict[str, list[UploadFile]] = {}
    for part, value in form.multi_items():
        name = part.removesuffix("[]")
        if isinstance(value, UploadFile):
            if name not in files:
                raise OmniClientError(f"{name[:80]}: no file is taken here", param=name[:80])
            uploads.setdefault(name, []).append(value)
        elif name in files and name not in lists:
            raise OmniClientError(f"{name}: should be a file with a file name", param=name)
        elif name in lists:
            texts.setdefault(name, []).append(value)
        elif name in texts:
            raise OmniClientError(f"{name[:80]}: was given twice", param=name[:80])
        else:
            texts[name] = value
    return texts, uploads


def _from_json(text: str, name: str) -> Any:
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise OmniClientError(f"{name}: should be JSON: {str(error)[:200]}", param=name) from None


def _validated(model: type[M], texts: dict[str, Any]) -> M:
    try:
        return model.model_validate(texts)
    except ValidationError as error:
        details = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(details, body=texts) from None


def form_schema(
    model: type[BaseModel],
    files: Collection[str],
    *,
    objects: Collection[str] = (),
    lists: Collection[str] = (),
) -> dict[str, Any]:
    """What `openapi_extra` of a route says about its form.

    Args:
        model: What its fields are.
        files: Parts that are files.
        objects: Fields that hold JSON.
        lists: Files that may come more than once.
    """
    schema = model.model_json_schema()
    schema.pop("$defs", None)  # only objects refer to them
    file = {"type": "string", "format": "binary"}
    for name in objects:
        what = schema["properties"][name].get("description", "")
        schema["properties"][name] = {"type": "string", "description": f"{what} (JSON)".strip()}
    for name in files:
        schema["properties"][name] = {"type": "array", "items": file} if name in lists else file
    return {"requestBody": {"required": True, "content": {FORM_TYPES[0]: {"schema": schema}}}}
