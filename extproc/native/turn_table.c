/* The type TurnTable and the reader of plain conversations of extproc._core:
 * extproc/tokenizing/plain_turns.py describes them. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"
#include "plain_chat.h"
#include "turn_table.h"

/* plain_chat(body, limited): (model, salt, roles, spans), or None. */
PyObject *module_plain_chat(PyObject *Py_UNUSED(module), PyObject *given) {
    char *body, *limited;
    Py_ssize_t length, limited_length;
    PlainChat chat;
    PyObject *first = PyTuple_Size(given) == 2 ? PyTuple_GetItem(given, 0) : Py_None;
    PyObject *second = first == Py_None ? first : PyTuple_GetItem(given, 1);
    if (PyBytes_AsStringAndSize(first, &body, &length) ||
        PyBytes_AsStringAndSize(second, &limited, &limited_length))
        return NULL;
    if (!plain_chat_read((const uint8_t *)body, (size_t)length, (const uint8_t *)limited, &chat))
        return Py_BuildValue("");
    return Py_BuildValue("(s#s#y#y#)", (const char *)chat.model.bytes,
                         (Py_ssize_t)chat.model.length, (const char *)chat.salt.bytes,
                         (Py_ssize_t)chat.salt.length, (const char *)chat.roles, (Py_ssize_t)chat.count,
                         (const char *)chat.contents,
                         (Py_ssize_t)(chat.count * sizeof *chat.contents));
}

/* --- texts of turns --- */

/* A text that is being written. bytes: as many as `capacity` says. */
typedef struct {
    char *bytes;
    size_t length, capacity;
} Draft;

static bool draft_reserve(Draft *draft, size_t length) {
    draft->length = 0;
    if (length <= draft->capacity) return true;
    char *bytes = realloc(draft->bytes, length);
    if (!bytes) return false;
    draft->bytes = bytes;
    draft->capacity = length;
    return true;
}

static void draft_add(Draft *draft, const char *bytes, size_t length) {
    if (length) memcpy(draft->bytes + draft->length, bytes, length);
    draft->length += length;
}

/* Returns what stands for a letter behind a backslash, 0 if that takes a decoder to know. */
static char unescaped(char letter) {
    switch (letter) {
        case '"': case '\\': case '/': return letter;
        case 'b': return '\b';
        case 'f': return '\f';
        case 'n': return '\n';
        case 'r': return '\r';
        case 't': return '\t';
        default: return 0;
    }
}

enum { NUMBERED_BYTES = 6, HIGH_SURROGATE = 0xd8, LOW_SURROGATE = 0xdc, SURROGATE_MASK = 0xfc };

/* Returns the number of an escape like \u00e9; -1 if none stands there. */
static long number_at(const char *place, size_t length) {
    if (length < NUMBERED_BYTES || place[0] != '\\' || place[1] != 'u') return -1;
    long number = 0;
    for (int n = 2; n < NUMBERED_BYTES; n++) {
        char digit = place[n];
        char letter = (char)(digit | 0x20);
        bool is_letter = letter >= 'a' && letter <= 'f';
        if (!is_letter && (digit < '0' || digit > '9')) return -1;
        number = number * 16 + (is_letter ? letter - 'a' + 10 : digit - '0');
    }
    return number;
}

static bool is_surrogate(long number, int kind) {
    return number >= 0 && ((number >> 8) & SURROGATE_MASK) == kind;
}

static void draft_add_character(Draft *draft, long number) {
    char bytes[4];
    size_t length = number < 0x80 ? 1 : number < 0x800 ? 2 : number < 0x10000 ? 3 : 4;
    for (size_t n = length; --n > 0; number >>= 6) bytes[n] = (char)(0x80 | (number & 0x3f));
    static const int marks[] = {0, 0, 0xc0, 0xe0, 0xf0};
    bytes[0] = (char)(marks[length] | number);
    draft_add(draft, bytes, length);
}

/* Adds the character of a numbered escape, or of two; returns their bytes, 0 if that takes a
 * decoder. */
static size_t draft_add_numbered(Draft *draft, const char *place, size_t length) {
    long first = number_at(place, length), second = -1;
    if (first < 0 || is_surrogate(first, LOW_SURROGATE)) return 0;
    if (!is_surrogate(first, HIGH_SURROGATE)) {
        draft_add_character(draft, first);
        return NUMBERED_BYTES;
    }
    second = number_at(place + NUMBERED_BYTES, length - NUMBERED_BYTES);
    if (!is_surrogate(second, LOW_SURROGATE)) return 0;
    draft_add_character(draft, 0x10000 + ((first & 0x3ff) << 10) + (second & 0x3ff));
    return 2 * NUMBERED_BYTES;
}

/* Adds a content as it is written, decoded; false if that takes a decoder. */
static bool draft_decode(Draft *draft, const char *content, size_t length) {
    while (length) {
        const char *escape = memchr(content, '\\', length);
        size_t plain = escape ? (size_t)(escape - content) : length;
        draft_add(draft, content, plain);
        if (!escape) return true;
        size_t rest = length - plain, taken = 2;
        char letter = rest > 1 ? unescaped(escape[1]) : 0;
        if (letter)
            draft_add(draft, &letter, 1);
        else
            taken = draft_add_numbered(draft, escape, rest);
        if (!taken) return false;
        content = escape + taken;
        length = rest - taken;
    }
    return true;
}

/* Returns the text of a turn, None if it takes a decoder to know it; NULL after an error. */
static PyObject *turn_text(Draft *draft, PyObject *before, const char *content, size_t length,
                           PyObject *behind) {
    Py_ssize_t before_length, behind_length;
    const char *first = PyUnicode_AsUTF8AndSize(before, &before_length);
    const char *last = first ? PyUnicode_AsUTF8AndSize(behind, &behind_length) : NULL;
    if (!last) { /* a lone surrogate in a template: the encoder will refuse it */
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return NULL;
        PyErr_Clear();
        return Py_BuildValue("");
    }
    if (!draft_reserve(draft, (size_t)before_length + length + (size_t)behind_length))
        return PyErr_NoMemory();
    draft_add(draft, first, (size_t)before_length);
    PyObject *text = NULL;
    if (draft_decode(draft, content, length)) {
        draft_add(draft, last, (size_t)behind_length);
        text = PyUnicode_DecodeUTF8(draft->bytes, (Py_ssize_t)draft->length, "strict");
        if (!text && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) PyErr_Clear();
    }
    return text || PyErr_Occurred() ? text : Py_BuildValue("");
}

/* turn_texts(body, spans, new, before, behind): the text of each new turn, or None. */
PyObject *module_turn_texts(PyObject *Py_UNUSED(module), PyObject *given) {
    const char *body, *spans;
    Py_ssize_t length, spans_length;
    PyObject *new, *before, *behind;
    if (!PyArg_ParseTuple(given, "y#y#O!O!O!", &body, &length, &spans, &spans_length, &PyList_Type,
                          &new, &PyTuple_Type, &before, &PyTuple_Type, &behind))
        return NULL;
    Py_ssize_t count = PyList_Size(new), most = spans_length / (Py_ssize_t)sizeof(ContentSpan);
    PyObject *texts = PyList_New(count);
    Draft draft = {0};
    for (Py_ssize_t n = 0; texts && n < count; n++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyList_GetItem(new, n));
        PyObject *text = NULL;
        if (at >= 0 && at < most) {
            ContentSpan span;
            memcpy(&span, spans + (size_t)at * sizeof span, sizeof span);
            PyObject *one = PyTuple_GetItem(before, at), *other = PyTuple_GetItem(behind, at);
            if (one && other && span.start <= span.end && span.end <= (uint64_t)length)
                text = turn_text(&draft, one, body + span.start, (size_t)(span.end - span.start),
                                 other);
        }
        if (!text && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such turn");
        if (!text || PyList_SetItem(texts, n, text)) Py_CLEAR(texts);
    }
    free(draft.bytes);
    return texts;
}

/* --- the table --- */

enum { FIRST_CHAINS = 64, SEEDS = 3, ENTRY_BYTES = 120 };

/* A content as it is written, and its ids. shape: of what the template writes around it. */
typedef struct Entry {
    struct Entry *next;
    PyObject *ids;
    uint64_t hash;
    size_t length, cost;
    uint32_t shape;
    uint8_t content[];
} Entry;

/* chains: as many as `mask` says, by the hash; NULL without any. */
typedef struct {
    Entry **chains;
    size_t mask, count, cost;
} Generation;

typedef struct {
    PyObject_HEAD
    Generation young, old;
    size_t most_cost;
    uint64_t seeds[SEEDS];
} TurnTable;

static inline uint64_t mixed(uint64_t one, uint64_t other) {
    __extension__ typedef unsigned __int128 Wide;
    Wide product = (Wide)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* A keyed hash, by which nobody else can find contents that share a chain. */
static uint64_t hash_of(const uint64_t *seeds, uint32_t shape, const uint8_t *content,
                        size_t length) {
    uint64_t hash = mixed(seeds[0] ^ length, seeds[1] ^ shape), words[2];
    for (; length >= sizeof words; length -= sizeof words, content += sizeof words) {
        memcpy(words, content, sizeof words);
        hash = mixed(words[0] ^ seeds[1] ^ hash, words[1] ^ seeds[2]);
    }
    if (length) {
        words[0] = words[1] = 0;
        memcpy(words, content, length);
        hash = mixed(words[0] ^ seeds[1] ^ hash, words[1] ^ seeds[2]);
    }
    return mixed(hash ^ seeds[0], seeds[2]);
}

static void generation_clear(Generation *generation) {
    for (size_t n = 0; generation->chains && n <= generation->mask; n++) {
        for (Entry *entry = generation->chains[n]; entry;) {
            Entry *next = entry->next;
            Py_DECREF(entry->ids);
            free(entry);
            entry = next;
        }
    }
    free(generation->chains);
    *generation = (Generation){0};
}

/* The place that points to an entry, or to the end of its chain; NULL without chains. */
static Entry **generation_place(const Generation *generation, uint64_t hash, uint32_t shape,
                                const uint8_t *content, size_t length) {
    if (!generation->chains) return NULL;
    Entry **place = &generation->chains[hash & generation->mask];
    while (*place && ((*place)->hash != hash || (*place)->shape != shape ||
                      (*place)->length != length || memcmp((*place)->content, content, length)))
        place = &(*place)->next;
    return place;
}

static void chain(Entry **chains, size_t mask, Entry *entry) {
    Entry **place = &chains[entry->hash & mask];
    entry->next = *place;
    *place = entry;
}

/* Makes room for one more entry; false without memory. */
static bool generation_grow(Generation *generation) {
    if (generation->chains && generation->count <= generation->mask) return true;
    size_t mask = generation->chains ? 2 * generation->mask + 1 : FIRST_CHAINS - 1;
    Entry **chains = calloc(mask + 1, sizeof *chains);
    if (!chains) return false;
    for (size_t n = 0; generation->chains && n <= generation->mask; n++) {
        for (Entry *entry = generation->chains[n]; entry;) {
            Entry *next = entry->next;
            chain(chains, mask, entry);
            entry = next;
        }
    }
    free(generation->chains);
    generation->chains = chains;
    generation->mask = mask;
    return true;
}

/* Takes an entry into the younger generation; if that is full, the older one is dropped first.
 * False without memory: the entry is then still the caller's. */
static bool table_add(TurnTable *self, Entry *entry) {
    if (self->young.cost + entry->cost > self->most_cost) {
        Generation dropped = self->old;
        self->old = self->young;
        self->young = (Generation){0};
        generation_clear(&dropped);
    }
    if (!generation_grow(&self->young)) return false;
    chain(self->young.chains, self->young.mask, entry);
    self->young.count++;
    self->young.cost += entry->cost;
    return true;
}

/* Forgets an entry that no generation has. */
static void entry_free(Entry *entry) {
    Py_DECREF(entry->ids);
    free(entry);
}

/* Returns the ids of a turn; NULL if they are not known. */
static PyObject *table_find(TurnTable *self, uint32_t shape, const uint8_t *content,
                            size_t length) {
    uint64_t hash = hash_of(self->seeds, shape, content, length);
    Entry **place = generation_place(&self->young, hash, shape, content, length);
    if (place && *place) {
        Py_INCREF((*place)->ids);
        return (*place)->ids;
    }
    place = generation_place(&self->old, hash, shape, content, length);
    if (!place || !*place) return NULL;
    Entry *entry = *place;
    PyObject *ids = entry->ids;
    Py_INCREF(ids);
    *place = entry->next;
    self->old.count--;
    self->old.cost -= entry->cost;
    if (!table_add(self, entry)) entry_free(entry);
    return ids;
}

static PyObject *table_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    Py_ssize_t max_bytes, length;
    const char *secret;
    if (!PyArg_ParseTuple(arguments, "ny#", &max_bytes, &secret, &length)) return NULL;
    uint64_t seeds[SEEDS];
    if (max_bytes < 0 || length != (Py_ssize_t)sizeof seeds) {
        PyErr_SetString(PyExc_ValueError, "wants a limit, and a secret of 24 bytes");
        return NULL;
    }
    TurnTable *self = (TurnTable *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    memcpy(self->seeds, secret, sizeof seeds);
    self->most_cost = (size_t)max_bytes / 2; /* of each generation */
    return (PyObject *)self;
}

static void table_dealloc(TurnTable *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    generation_clear(&self->young);
    generation_clear(&self->old);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* What `find` is asked for, checked. */
typedef struct {
    const uint8_t *body, *spans, *shapes;
    size_t length;
    Py_ssize_t count;
} Wanted;

static bool wanted_read(PyObject *const *given, Py_ssize_t were, Wanted *wanted) {
    char *body, *spans, *shapes;
    Py_ssize_t length, spans_length, shapes_length;
    if (!are_given(given, were, "bbb") || PyBytes_AsStringAndSize(given[0], &body, &length) ||
        PyBytes_AsStringAndSize(given[1], &spans, &spans_length) ||
        PyBytes_AsStringAndSize(given[2], &shapes, &shapes_length))
        return false;
    Py_ssize_t count = spans_length / (Py_ssize_t)sizeof(ContentSpan);
    if (spans_length != count * (Py_ssize_t)sizeof(ContentSpan) ||
        shapes_length != count * (Py_ssize_t)sizeof(uint32_t)) {
        PyErr_SetString(PyExc_ValueError, "wants as many shapes as spans");
        return false;
    }
    *wanted = (Wanted){(const uint8_t *)body, (const uint8_t *)spans, (const uint8_t *)shapes,
                       (size_t)length, count};
    return true;
}

/* Returns the ids of a content, or the text as it is written, in quotes; NULL after an error. */
static PyObject *part_of(TurnTable *self, const Wanted *wanted, Py_ssize_t at, bool *is_new) {
    ContentSpan span;
    uint32_t shape;
    memcpy(&span, wanted->spans + (size_t)at * sizeof span, sizeof span);
    memcpy(&shape, wanted->shapes + (size_t)at * sizeof shape, sizeof shape);
    if (!span.start || span.start > span.end || span.end >= wanted->length) {
        PyErr_SetString(PyExc_ValueError, "a span outside of the body");
        return NULL;
    }
    const uint8_t *content = wanted->body + span.start;
    size_t length = (size_t)(span.end - span.start);
    PyObject *ids = table_find(self, shape, content, length);
    *is_new = !ids;
    return ids ? ids : PyBytes_FromStringAndSize((const char *)content - 1, (Py_ssize_t)length + 2);
}

static bool note_new(PyObject *found, Py_ssize_t at) {
    PyObject *place = PyLong_FromSsize_t(at);
    bool is_noted = place && !PyList_Append(found, place);
    Py_XDECREF(place);
    return is_noted;
}

/* find(body, spans, shapes): (parts, new). */
static PyObject *table_find_all(TurnTable *self, PyObject *const *given, Py_ssize_t were) {
    Wanted wanted;
    if (!wanted_read(given, were, &wanted)) return NULL;
    PyObject *parts = PyList_New(wanted.count), *new = PyList_New(0);
    bool is_sound = parts && new;
    for (Py_ssize_t at = 0; is_sound && at < wanted.count; at++) {
        bool is_new = false;
        PyObject *part = part_of(self, &wanted, at, &is_new);
        is_sound = part && !PyList_SetItem(parts, at, part) && (!is_new || note_new(new, at));
    }
    PyObject *both = is_sound ? PyTuple_Pack(2, parts, new) : NULL;
    Py_XDECREF(parts);
    Py_XDECREF(new);
    return both;
}

/* Keeps a turn; false after an error. text: its content as `find` returned it. */
static bool table_keep(TurnTable *self, uint32_t shape, PyObject *text, PyObject *ids) {
    char *quoted;
    Py_ssize_t quoted_length, count = PyObject_Size(ids);
    if (count < 0 || PyBytes_AsStringAndSize(text, &quoted, &quoted_length)) return false;
    if (quoted_length < 2) {
        PyErr_SetString(PyExc_ValueError, "a text without quotes");
        return false;
    }
    const uint8_t *content = (const uint8_t *)quoted + 1;
    size_t length = (size_t)quoted_length - 2;
    PyObject *known = table_find(self, shape, content, length); /* by another thread meanwhile */
    Py_XDECREF(known);
    size_t cost = length + sizeof(uint32_t) * (size_t)count + ENTRY_BYTES;
    if (known || cost > self->most_cost) return true;
    Entry *entry = malloc(sizeof *entry + length);
    if (!entry) {
        PyErr_NoMemory();
        return false;
    }
    uint64_t hash = hash_of(self->seeds, shape, content, length);
    *entry = (Entry){NULL, ids, hash, length, cost, shape};
    memcpy(entry->content, content, length);
    Py_INCREF(ids);
    if (table_add(self, entry)) return true;
    entry_free(entry);
    PyErr_NoMemory();
    return false;
}

/* keep(parts, new, shapes, made): puts the ids that were made of new turns in their places. */
static PyObject *table_keep_all(TurnTable *self, PyObject *given) {
    PyObject *parts, *new, *made;
    const char *shapes;
    Py_ssize_t shapes_length;
    if (!PyArg_ParseTuple(given, "O!O!y#O!", &PyList_Type, &parts, &PyList_Type, &new, &shapes,
                          &shapes_length, &PyList_Type, &made))
        return NULL;
    Py_ssize_t most = shapes_length / (Py_ssize_t)sizeof(uint32_t), count = PyList_Size(new);
    bool is_sound = PyList_Size(made) == count && PyList_Size(parts) >= most;
    for (Py_ssize_t n = 0; is_sound && n < count; n++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyList_GetItem(new, n));
        is_sound = at >= 0 && at < most;
        if (!is_sound) break;
        uint32_t shape;
        memcpy(&shape, shapes + (size_t)at * sizeof shape, sizeof shape);
        PyObject *ids = PyList_GetItem(made, n);
        if (!table_keep(self, shape, PyList_GetItem(parts, at), ids)) return NULL;
        Py_INCREF(ids);
        if (PyList_SetItem(parts, at, ids)) return NULL;
    }
    if (is_sound) return Py_BuildValue("");
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "wants ids of each new turn");
    return NULL;
}

static PyMethodDef table_methods[] = {
    {"find", (PyCFunction)(void (*)(void))table_find_all, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)table_keep_all, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_doc, "Ids of turns by their bytes; extproc.tokenizing.plain_turns describes it."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {0, NULL},
};

PyType_Spec turn_table_spec = {"extproc._core.TurnTable", sizeof(TurnTable), 0, Py_TPFLAGS_DEFAULT,
                               table_slots};
