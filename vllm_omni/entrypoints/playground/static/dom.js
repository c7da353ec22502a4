// SPDX-License-Identifier: Apache-2.0
// Elements, found and made. Text is only ever set as text: nothing here parses HTML.

export const find = (selector, root = document) => root.querySelector(selector);

/** A new element; a property that is a function is a listener of that event. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Makes these the options of a select; `none` is the text of one that says nothing. */
export function setOptions(select, values, none = null) {
  const before = select.value;
  const options = values.map((value) => make("option", { value, textContent: value }));
  if (none !== null) options.unshift(make("option", { value: "", textContent: none }));
  select.replaceChildren(...options);
  if (options.some((option) => option.value === before)) select.value = before;
}

/** What a form's fields say, without those left empty; numbers as numbers. */
export function fieldsOf(form, ...names) {
  const fields = {};
  for (const name of names) {
    const field = form.elements[name];
    const value = field.value.trim();
    if (value !== "") fields[name] = field.type === "number" ? Number(value) : value;
  }
  return fields;
}

/** Removes what the model does not offer: elements whose `data-if` is empty in `offer`. */
export function removeUnoffered(root, offer) {
  for (const element of root.querySelectorAll("[data-if]")) {
    const value = offer[element.dataset.if];
    if (!value || value.length === 0) element.remove();
  }
}

/** Ctrl+Enter (or Cmd+Enter) in a form's large text sends it. */
export function sendOnCtrlEnter(form) {
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}
