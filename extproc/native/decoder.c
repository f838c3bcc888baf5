/* Decodes messages of a proxy: what message.c reads becomes objects of Python.
 *
 * extproc/_core.pyi describes the interface. What this gives up, extproc.serving.proxy_decoder has
 * protobuf read, and extproc.serving.proxy_message makes the heads. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "decoder.h"
#include "message.h"
#include "objects.h"

/* Names of headers: a tuple, and their texts. */
typedef struct {
    PyObject *names;
    Text *texts;
    Py_ssize_t count;
} HeaderNames;

/* The places of headers among the names. */
typedef struct {
    Py_ssize_t *at;
    Py_ssize_t count;
} Places;

/* names: of the headers that are asked for; every: of those of which every value is. head: the class
 * of a request's head, NULL if no heads are made; where its headers stand among the names follows,
 * -1 for one that is not asked for. */
typedef struct {
    PyObject_HEAD
    PyObject *record; /* the class of what is returned */
    HeaderNames names, every;
    PyObject *head;
    Py_ssize_t method, path, length, policy, request_id, trace, encoding;
    Places session, conversation;
} CoreDecoder;

/* A header's text is cut at this length (extproc.serving.proxy_message.TEXT_BYTES). */
#define TEXT_BYTES 1024u

/* Longer ids are cut (extproc.base.headers.MAX_ID_LETTERS). */
#define MAX_ID_LETTERS 128u

/* Most digits of a content-length (extproc.serving.proxy_message). */
#define LENGTH_DIGITS 19u

/* With more names no head is made. */
#define MAX_NAMES 64

static void free_names(HeaderNames *names) {
    Py_XDECREF(names->names);
    PyMem_Free(names->texts);
}

static void decoder_dealloc(CoreDecoder *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->record);
    free_names(&self->names);
    free_names(&self->every);
    Py_XDECREF(self->head);
    PyMem_Free(self->session.at);
    PyMem_Free(self->conversation.at);
    PyObject_Free(self);
    Py_DECREF(type);
}

static bool take_names(HeaderNames *taken, PyObject *names) {
    taken->names = constant(names);
    taken->count = PyTuple_Size(names);
    taken->texts = PyMem_Malloc(sizeof(Text) * (size_t)(taken->count + 1));
    if (!taken->texts) return PyErr_NoMemory() != NULL;
    for (Py_ssize_t n = 0; n < taken->count; n++) {
        Py_ssize_t length;
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, n), &length);
        if (!name) return false;
        taken->texts[n] = (Text){(const uint8_t *)name, (size_t)length};
    }
    return true;
}

/* Returns where a header stands among the names, -1 if it is not there. */
static Py_ssize_t place_of(const HeaderNames *names, Text key) {
    for (Py_ssize_t n = 0; n < names->count; n++)
        if (names->texts[n].length == key.length &&
            !memcmp(names->texts[n].bytes, key.bytes, key.length))
            return n;
    return -1;
}

static Py_ssize_t place_of_word(const HeaderNames *names, const char *word) {
    return place_of(names, (Text){(const uint8_t *)word, strlen(word)});
}

static bool take_places(const CoreDecoder *self, PyObject *names, Places *places) {
    HeaderNames wanted = {0};
    bool is_taken = take_names(&wanted, names);
    places->at = is_taken ? PyMem_Malloc(sizeof *places->at * (size_t)(wanted.count + 1)) : NULL;
    for (Py_ssize_t n = 0; places->at && n < wanted.count; n++)
        places->at[places->count++] = place_of(&self->names, wanted.texts[n]);
    free_names(&wanted);
    return places->at || (is_taken && PyErr_NoMemory());
}

/* rules: the class of heads, the policy's header or "", those of sessions, those of conversations. */
static bool take_head(CoreDecoder *self, PyObject *rules) {
    PyObject *head, *session, *conversation;
    const char *policy;
    if (rules == Py_None || self->names.count > MAX_NAMES) return true;
    if (!PyArg_ParseTuple(rules, "OsO!O!", &head, &policy, &PyTuple_Type, &session, &PyTuple_Type,
                          &conversation))
        return false;
    self->head = constant(head);
    self->method = place_of_word(&self->names, ":method");
    self->path = place_of_word(&self->names, ":path");
    self->length = place_of_word(&self->names, "content-length");
    self->policy = place_of_word(&self->names, policy);
    self->request_id = place_of_word(&self->names, "x-request-id");
    self->trace = place_of_word(&self->names, "traceparent");
    self->encoding = place_of_word(&self->names, "content-encoding");
    return take_places(self, session, &self->session) &&
           take_places(self, conversation, &self->conversation);
}

static PyObject *decoder_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    PyObject *record, *names, *every, *rules;
    if (!PyArg_ParseTuple(arguments, "OO!O!O", &record, &PyTuple_Type, &names, &PyTuple_Type,
                          &every, &rules))
        return NULL;
    CoreDecoder *self = (CoreDecoder *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->record = constant(record);
    if (take_names(&self->names, names) && take_names(&self->every, every) &&
        take_head(self, rules))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Returns the name of a header that is asked for (borrowed), NULL of another. */
static PyObject *name_of(const HeaderNames *names, Text key) {
    Py_ssize_t place = place_of(names, key);
    return place < 0 ? NULL : PyTuple_GetItem(names->names, place);
}

/* Envoy fills raw_value, other proxies value (core/v3/base.proto). */
static Text value_of(const ProxyHeader *header) {
    Text text = header->raw_value.length ? header->raw_value : header->value;
    return (Text){text.bytes, text.length < TEXT_BYTES ? text.length : TEXT_BYTES};
}

static PyObject *decoded(Text text) {
    return PyUnicode_DecodeUTF8((const char *)text.bytes, (Py_ssize_t)text.length, "replace");
}

static PyObject *text_of(const ProxyHeader *header) { return decoded(value_of(header)); }

static PyObject *headers_of(const CoreDecoder *self, Text rest) {
    PyObject *headers = PyDict_New();
    ProxyHeader header;
    while (headers && message_next_header(&rest, &header)) {
        PyObject *name = header.key.length ? name_of(&self->names, header.key) : NULL;
        if (!name) continue;
        PyObject *text = text_of(&header);
        if (!text || PyDict_SetItem(headers, name, text)) Py_CLEAR(headers);
        Py_XDECREF(text);
    }
    return headers;
}

/* Adds a value to those of its header; false if there is no memory. */
static bool add_value(PyObject *values, PyObject *name, Text text) {
    PyObject *value = bytes_of(text), *found = PyDict_GetItem(values, name);
    PyObject *list = found ? constant(found) : PyList_New(0);
    bool is_added = value && list && !PyList_Append(list, value) &&
                    (found || !PyDict_SetItem(values, name, list));
    Py_XDECREF(value);
    Py_XDECREF(list);
    return is_added;
}

/* Returns all values, as they came, of the headers of which every value is asked for. */
static PyObject *values_of(const CoreDecoder *self, const ProxyMessage *message) {
    PyObject *values = PyDict_New();
    bool are_headers = message->kind == REQUEST_HEADERS || message->kind == RESPONSE_HEADERS;
    Text rest = are_headers && self->every.count ? message->headers : (Text){0};
    ProxyHeader header;
    while (values && message_next_header(&rest, &header)) {
        PyObject *name = header.key.length ? name_of(&self->every, header.key) : NULL;
        Text text = header.raw_value.length ? header.raw_value : header.value;
        if (name && text.length && !add_value(values, name, text)) Py_CLEAR(values);
    }
    return values;
}

static PyObject *context_of(const uint8_t *data, size_t length) {
    Buffer context = {0};
    message_add_context(data, length, &context);
    PyObject *made = context.is_broken
                         ? PyErr_NoMemory()
                         : bytes_of((Text){buffer_content(&context), buffer_length(&context)});
    buffer_free(&context);
    return made;
}

static PyObject *modes_of(const ProxyMessage *message) {
    if (!message->has_modes) return constant(Py_None);
    return Py_BuildValue("(ii)", message->request_mode, message->response_mode);
}

/* --- the head of a request --- */

/* The values of the headers that are asked for, by their places; the last one of each counts. A
 * header that did not come has no bytes. */
typedef struct {
    Text texts[MAX_NAMES];
} Values;

static void take_values(const CoreDecoder *self, Text rest, Values *values) {
    static const uint8_t NOTHING[1];
    ProxyHeader header;
    memset(values->texts, 0, sizeof(Text) * (size_t)self->names.count);
    while (message_next_header(&rest, &header)) {
        Py_ssize_t place = header.key.length ? place_of(&self->names, header.key) : -1;
        if (place < 0) continue;
        values->texts[place] = value_of(&header);
        if (!values->texts[place].bytes) values->texts[place].bytes = NOTHING;
    }
}

static Text text_at(const Values *values, Py_ssize_t place) {
    return place < 0 ? (Text){0} : values->texts[place];
}

static Text first_of(const Values *values, const Places *places) {
    for (Py_ssize_t n = 0; n < places->count; n++) {
        Text text = text_at(values, places->at[n]);
        if (text.length) return text;
    }
    return (Text){0};
}

/* Whether `path_of` returns a target as it is: a path that it neither cuts nor decodes. */
static bool is_plain_path(Text path) {
    if (!path.length || path.bytes[0] != '/' || path.bytes[path.length - 1] == '/') return false;
    for (size_t n = 0; n < path.length; n++)
        if (path.bytes[n] == '?' || path.bytes[n] == '#' || path.bytes[n] == '%') return false;
    return true;
}

/* Cuts an id; false if that takes more than counting bytes. */
static bool cut_id(Text *id) {
    bool is_long = id->length > MAX_ID_LETTERS;
    for (size_t n = 0; is_long && n < id->length; n++)
        if (id->bytes[n] & 0x80u) return false;
    if (is_long) id->length = MAX_ID_LETTERS;
    return true;
}

static PyObject *number_of(Text text) {
    unsigned long long number = 0;
    if (!text.length || text.length > LENGTH_DIGITS) return constant(Py_None);
    for (size_t n = 0; n < text.length; n++) {
        if (text.bytes[n] < '0' || text.bytes[n] > '9') return constant(Py_None);
        number = number * 10 + (unsigned)(text.bytes[n] - '0');
    }
    return PyLong_FromUnsignedLongLong(number);
}

/* Returns the head of a request without a context; NULL, without an error, if it gives up. */
static PyObject *head_of(const CoreDecoder *self, const ProxyMessage *message) {
    Values values;
    take_values(self, message->headers, &values);
    Text path = text_at(&values, self->path), policy = text_at(&values, self->policy);
    Text request_id = text_at(&values, self->request_id), trace = text_at(&values, self->trace);
    if (!is_plain_path(path) || !cut_id(&request_id) || !cut_id(&trace)) return NULL;
    if (text_at(&values, self->encoding).length) return NULL; /* few requests are compressed */
    PyObject *parts = Py_BuildValue(
        "(NNNNONNNN)", decoded(text_at(&values, self->method)), decoded(path),
        number_of(text_at(&values, self->length)),
        policy.bytes ? decoded(policy) : constant(Py_None), Py_None,
        decoded(first_of(&values, &self->session)), decoded(first_of(&values, &self->conversation)),
        decoded(request_id), decoded(trace));
    PyObject *head = parts ? PyObject_CallObject(self->head, parts) : NULL;
    Py_XDECREF(parts);
    return head;
}

static bool may_have_head(const CoreDecoder *self, const ProxyMessage *message) {
    return self->head && message->kind == REQUEST_HEADERS && !message->has_context;
}

/* Returns what a message says, which was read. */
static PyObject *object_of(const CoreDecoder *self, Text text, const ProxyMessage *message) {
    PyObject *head = may_have_head(self, message) ? head_of(self, message) : NULL;
    if (PyErr_Occurred()) return NULL;
    PyObject *headers = head ? PyDict_New() : headers_of(self, message->headers);
    PyObject *context =
        message->has_context ? context_of(text.bytes, text.length) : constant(Py_None);
    PyObject *values =
        Py_BuildValue("(iNNNNNNNn)", (int)message->kind, headers, bytes_of(message->body),
                      truth(message->is_last), modes_of(message), context,
                      values_of(self, message), head ? head : constant(Py_None),
                      (Py_ssize_t)text.length);
    if (!values) return NULL;
    PyObject *made = PyObject_CallObject(self->record, values);
    Py_DECREF(values);
    return made;
}

static PyObject *decoder_decode(CoreDecoder *self, PyObject *given) {
    char *data;
    Py_ssize_t length;
    ProxyMessage message;
    if (PyBytes_AsStringAndSize(given, &data, &length)) return NULL;
    Text text = {(const uint8_t *)data, (size_t)length};
    if (!message_read(text.bytes, text.length, &message)) return constant(Py_None);
    return object_of(self, text, &message);
}

PyObject *decoder_read(PyObject *decoder, Text text) {
    ProxyMessage message;
    if (!message_read(text.bytes, text.length, &message) || message.has_context) return NULL;
    return object_of((const CoreDecoder *)decoder, text, &message);
}

/* Returns what a message says; None if that is left to protobuf. */
static PyObject *decoder_py_read(PyObject *self, PyObject *given) {
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &data, &length)) return NULL;
    PyObject *read = decoder_read(self, (Text){(const uint8_t *)data, (size_t)length});
    return read || PyErr_Occurred() ? read : constant(Py_None);
}

static PyMethodDef decoder_methods[] = {
    {"decode", (PyCFunction)decoder_decode, METH_O, NULL},
    {"read", decoder_py_read, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decodes messages of a proxy; the stub describes it."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

static PyType_Spec decoder_spec = {"extproc._core.Decoder", sizeof(CoreDecoder), 0,
                                   Py_TPFLAGS_DEFAULT, decoder_slots};

static PyTypeObject *decoder_type;

bool decoder_add(PyObject *module) {
    PyObject *type = PyType_FromSpec(&decoder_spec);
    if (!type || PyModule_AddObject(module, "Decoder", type)) {
        Py_XDECREF(type);
        return false;
    }
    decoder_type = (PyTypeObject *)type;
    return true;
}

bool is_decoder(PyObject *object) { return PyObject_TypeCheck(object, decoder_type); }
