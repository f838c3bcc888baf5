/* The claims at marks: extproc/_core.pyi describes them. A slot's extra is a reference to the claims
 * of a mark, a tuple. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stdbool.h>
#include <structmember.h>

#include "../../kvstate/native/table.h"
#include "mark_table.h"
#include "objects.h"

enum { HOLDINGS, WORKER, LOST_AT, SENT_AT, ENDED_AT, MARK_BYTES, KEYS, LENGTHS, NUMBER, WORDS };

static const char *const SPELLED[WORDS] = {"holdings",   "worker", "lost_at", "sent_at", "ended_at",
                                           "mark_bytes", "keys",   "lengths", "number"};

static PyObject *words[WORDS];
static PyTypeObject *mark_table_type;

/* make, fewer: functions that make a claim, and choose some of more than `most`. The others are of its
 * memory: extproc.routing.claims.claim_table.Costs describes them. */
typedef struct {
    PyObject_HEAD
    PyObject *make, *fewer;
    Py_ssize_t most;
    double slot_cost, place_cost, keys_cost;
    long long bytes;
    Table claims;
} MarkTable;

/* The keys of some marks, which a function was given. */
typedef struct {
    const char *bytes;
    Py_ssize_t count;
} Keys;

static Keys keys_in(PyObject *bytes) {
    return (Keys){PyBytes_AsString(bytes), PyBytes_Size(bytes) / MARK_KEY_BYTES};
}

/* Returns the bytes of an object's keys, with a reference; NULL after an error. */
static PyObject *keys_of(PyObject *object) {
    PyObject *bytes = PyObject_GetAttr(object, words[KEYS]);
    if (bytes && !PyBytes_Check(bytes)) {
        PyErr_SetString(PyExc_TypeError, "no keys");
        Py_CLEAR(bytes);
    }
    return bytes;
}

static uint64_t key_at(Keys keys, Py_ssize_t n) {
    return mark_key_read(keys.bytes + n * MARK_KEY_BYTES);
}

/* Returns the claims in a slot, borrowed. */
static PyObject *claims_in(Slot slot) { return (PyObject *)(uintptr_t)entry_of(slot)->extra; }

/* Puts other claims into a slot, with a reference of their own. */
static void put_claims(Slot slot, PyObject *claims) {
    PyObject *before = claims_in(slot);
    Py_INCREF(claims);
    entry_of(slot)->extra = (uintptr_t)claims;
    Py_XDECREF(before);
}

/* Fetches the slots of keys ahead: most of them are not in a cache. */
static void fetch_ahead(MarkTable *self, Keys keys) {
    for (Py_ssize_t n = 0; n < keys.count; n++) table_prefetch(&self->claims, key_at(keys, n));
}

static bool number_of(PyObject *object, int word, double *number) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    if (!value) return false;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *number != -1.0 || !PyErr_Occurred();
}

/* --- what each worker probably holds --- */

typedef struct {
    double now, speculative, grace, approximate;
} Times;

/* Notes in `found` that a worker holds this many tokens of a prompt; false after an error. */
static bool note_held(PyObject *found, PyObject *worker, Py_ssize_t length, bool is_under_way) {
    PyObject *before = PyDict_GetItemWithError(found, worker);
    Py_ssize_t speculative = 0, approximate = 0;
    if (before)
        (void)PyArg_ParseTuple(before, "nn", &speculative, &approximate);
    if (PyErr_Occurred()) return false;
    if (is_under_way && length > speculative) speculative = length;
    if (length > approximate) approximate = length;
    PyObject *after = Py_BuildValue("(nn)", speculative, approximate);
    bool is_noted = after && !PyDict_SetItem(found, worker, after);
    Py_XDECREF(after);
    return is_noted;
}

/* Notes one claim, its worker's newest; false after an error. */
static bool note_claim(PyObject *found, PyObject *claim, PyObject *holdings, Py_ssize_t length,
                       const Times *times) {
    double sent_at, lost_at, ended_at;
    if (!number_of(claim, SENT_AT, &sent_at) || !number_of(holdings, LOST_AT, &lost_at)) return false;
    double age = times->now - sent_at;
    if (age >= times->approximate || sent_at <= lost_at) return true;
    if (!number_of(claim, ENDED_AT, &ended_at)) return false;
    bool is_under_way = times->now < ended_at + times->grace && age < times->speculative;
    PyObject *worker = PyObject_GetAttr(holdings, words[WORKER]);
    bool is_noted = worker && note_held(found, worker, length, is_under_way);
    Py_XDECREF(worker);
    return is_noted;
}

/* Notes the claims of the longest mark of a run of marks; false after an error. */
static bool note_stretch(PyObject *found, PyObject *claims, Py_ssize_t length, const Times *times) {
    PyObject *newest = NULL; /* the claim before has it */
    Py_ssize_t count = PyTuple_Size(claims);
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *claim = PyTuple_GetItem(claims, n);
        PyObject *holdings = PyObject_GetAttr(claim, words[HOLDINGS]);
        bool is_noted = holdings && (holdings == newest ||
                                     note_claim(found, claim, holdings, length, times));
        newest = holdings;
        Py_XDECREF(holdings);
        if (!is_noted) return false;
    }
    return count >= 0;
}

/* --- runs of marks with the same claims --- */

/* Returns the claims of a key, with a reference; NULL if there are none. */
static PyObject *claims_of(MarkTable *self, uint64_t key) {
    Slot slot = table_find(&self->claims, key);
    if (!slot.shard) return NULL;
    PyObject *claims = claims_in(slot);
    Py_INCREF(claims);
    return claims;
}

/* Where a walk over marks is: its next mark. */
typedef struct {
    MarkTable *table;
    PyObject *lengths;
    Keys keys;
    Py_ssize_t at;
} Walk;

/* Returns the claims of the next run of marks, with a reference, and the length of its longest; NULL
 * if no more are known, or after an error. */
static PyObject *next_stretch(Walk *walk, Py_ssize_t *length) {
    PyObject *claims = NULL;
    for (; walk->at < walk->keys.count; walk->at++) {
        PyObject *next = claims_of(walk->table, key_at(walk->keys, walk->at));
        bool is_next = next && (!claims || next == claims);
        if (!is_next) {
            if (!next) walk->at = walk->keys.count;
            Py_XDECREF(next);
            break;
        }
        Py_XDECREF(claims);
        claims = next;
        *length = PyLong_AsSsize_t(PyTuple_GetItem(walk->lengths, walk->at));
        if (PyErr_Occurred()) break;
    }
    if (PyErr_Occurred()) Py_CLEAR(claims);
    return claims;
}

/* Whether there is a length for each key. */
static bool are_lengths_of(PyObject *lengths, PyObject *keys) {
    if (PyTuple_Size(lengths) == keys_in(keys).count) return true;
    PyErr_SetString(PyExc_ValueError, "a length for each key");
    return false;
}

/* stretches(lengths, keys) */
static PyObject *marks_stretches(MarkTable *self, PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "tb") || !are_lengths_of(given[0], given[1])) return NULL;
    Walk walk = {self, given[0], keys_in(given[1]), 0};
    PyObject *list = PyList_New(0), *claims = NULL;
    Py_ssize_t length;
    while (list && (claims = next_stretch(&walk, &length))) {
        PyObject *stretch = Py_BuildValue("(nN)", length, claims);
        if (!stretch || PyList_Append(list, stretch)) Py_CLEAR(list);
        Py_XDECREF(stretch);
    }
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* Notes what a generation of the table says of marks, as far as it knows them one by one. */
static bool note_generation(PyObject *found, MarkTable *generation, PyObject *lengths, Keys keys,
                            const Times *times) {
    Walk walk = {generation, lengths, keys, 0};
    PyObject *claims;
    Py_ssize_t length;
    bool is_sound = true;
    while (is_sound && (claims = next_stretch(&walk, &length))) {
        is_sound = note_stretch(found, claims, length, times);
        Py_DECREF(claims);
    }
    return is_sound && !PyErr_Occurred();
}

static bool is_table(PyObject *object) {
    if (PyObject_TypeCheck(object, mark_table_type)) return true;
    PyErr_SetString(PyExc_TypeError, "no claims at marks");
    return false;
}

/* expected(old, young, lengths, keys, now, (speculative, grace, approximate)) */
PyObject *module_expected(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Times times;
    double lifetimes[3];
    if (!are_given(given, were, "ootboo") || !is_table(given[0]) || !is_table(given[1]) ||
        !read_numbers(given + 4, &times.now, 1) || !numbers_of(given[5], lifetimes, 3) ||
        !are_lengths_of(given[2], given[3]))
        return NULL;
    times.speculative = lifetimes[0];
    times.grace = lifetimes[1];
    times.approximate = lifetimes[2];
    Keys keys = keys_in(given[3]);
    PyObject *found = PyDict_New();
    for (int n = 0; found && n < 2; n++)
        if (!note_generation(found, (MarkTable *)given[n], given[2], keys, &times))
            Py_CLEAR(found);
    return found;
}

/* --- a new claim --- */

static bool is_of(PyObject *claim, PyObject *holdings, bool *is_same) {
    PyObject *own = PyObject_GetAttr(claim, words[HOLDINGS]);
    *is_same = own == holdings;
    Py_XDECREF(own);
    return own != NULL;
}

/* Appends the claims of the worker, or of all others; of the worker up to the first that has ended,
 * since an older one can no longer count. False after an error. */
static bool append_claims(PyObject *list, PyObject *claims, PyObject *holdings, bool wants_own) {
    Py_ssize_t count = PyTuple_Size(claims);
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *claim = PyTuple_GetItem(claims, n);
        bool is_own;
        double ended_at = 0.0;
        if (!is_of(claim, holdings, &is_own)) return false;
        if (is_own != wants_own) continue;
        if (PyList_Append(list, claim)) return false;
        if (!wants_own) continue;
        if (!number_of(claim, ENDED_AT, &ended_at)) return false;
        if (ended_at < INFINITY) break;
    }
    return count >= 0;
}

/* Returns claims with a new one, without those that can no longer count because of it. */
static PyObject *with_claim(PyObject *claim, PyObject *claims, PyObject *holdings) {
    PyObject *list = PyList_New(0), *made = NULL;
    if (list && !PyList_Append(list, claim) && append_claims(list, claims, holdings, true) &&
        append_claims(list, claims, holdings, false))
        made = PyList_AsTuple(list);
    Py_XDECREF(list);
    return made;
}

/* Returns a claim's memory at each of its marks; -1 after an error. */
static long long mark_bytes_of(PyObject *claim) {
    PyObject *value = PyObject_GetAttr(claim, words[MARK_BYTES]);
    long long bytes = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return bytes;
}

/* Returns the memory of claims at one mark; -1 after an error. */
static long long bytes_of_claims(PyObject *claims) {
    long long sum = 0;
    Py_ssize_t count = PyTuple_Size(claims);
    for (Py_ssize_t n = 0; n < count; n++) {
        long long bytes = mark_bytes_of(PyTuple_GetItem(claims, n));
        if (bytes < 0) return -1;
        sum += bytes;
    }
    return sum;
}

/* now: the time. since: when the requests under way began at the earliest. */
typedef struct {
    PyObject *claim, *holdings, *now, *since;
    long long mark_bytes;
} NewClaim;

/* Returns the claims of a mark with the new one, and by how much its memory grows. */
static PyObject *claims_after(const MarkTable *self, PyObject *claims, const NewClaim *new,
                              long long *more) {
    PyObject *after = with_claim(new->claim, claims, new->holdings);
    if (after && PyTuple_Size(after) > self->most) {
        PyObject *all = after;
        after = PyObject_CallFunctionObjArgs(self->fewer, all, new->since, NULL);
        Py_DECREF(all);
    }
    if (!after) return NULL;
    long long before = bytes_of_claims(claims), now = bytes_of_claims(after);
    *more = now - before;
    if (before < 0 || now < 0) Py_CLEAR(after);
    return after;
}

/* Puts the new claim to each key; false after an error. */
static bool put_claim(MarkTable *self, Keys keys, const NewClaim *new) {
    PyObject *alone = PyTuple_Pack(1, new->claim), *before = NULL, *after = NULL;
    long long more = 0, alone_bytes = (long long)self->slot_cost + new->mark_bytes;
    bool is_sound = alone != NULL;
    fetch_ahead(self, keys);
    for (Py_ssize_t n = 0; is_sound && n < keys.count; n++) {
        uint64_t key = key_at(keys, n);
        Gap gap;
        Slot slot = table_seek(&self->claims, key, &gap);
        bool is_alone = !slot.shard || claims_in(slot) == alone; /* it is if a key is there twice */
        if (is_alone) self->bytes += alone_bytes;
        if (!slot.shard) {
            slot = table_fill(&self->claims, key, 1, gap);
            is_sound = slot.shard != NULL;
            if (is_sound)
                put_claims(slot, alone);
            else
                (void)PyErr_NoMemory();
        }
        if (is_alone) continue;
        if (claims_in(slot) != before) { /* neighbouring marks usually have the same claims */
            Py_XDECREF(before);
            Py_XDECREF(after);
            before = claims_in(slot);
            Py_INCREF(before);
            after = claims_after(self, before, new, &more);
            slot = table_find(&self->claims, key); /* other code may have run */
        }
        is_sound = after != NULL;
        if (after && slot.shard) put_claims(slot, after);
        self->bytes += more;
    }
    Py_XDECREF(alone);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return is_sound;
}

/* Makes a claim and puts it to its marks; returns it, NULL after an error. */
static PyObject *recorded(MarkTable *self, PyObject *bytes, PyObject *lengths, NewClaim new) {
    Py_ssize_t length = PyBytes_Size(bytes);
    new.mark_bytes = (long long)self->place_cost +
                     (long long)self->keys_cost / (length ? length : MARK_KEY_BYTES);
    PyObject *mark_bytes = PyLong_FromLongLong(new.mark_bytes);
    if (!mark_bytes) return NULL;
    new.claim = PyObject_CallFunctionObjArgs(self->make, new.holdings, bytes, new.now, mark_bytes,
                                             lengths, NULL);
    Py_DECREF(mark_bytes);
    if (new.claim && !put_claim(self, keys_in(bytes), &new)) Py_CLEAR(new.claim);
    return new.claim;
}

/* record(holdings, marks, now, since) */
static PyObject *marks_record(MarkTable *self, PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "oooo")) return NULL;
    NewClaim new = {.holdings = given[0], .now = given[2], .since = given[3]};
    PyObject *bytes = keys_of(given[1]), *claim = NULL;
    PyObject *lengths = bytes ? PyObject_GetAttr(given[1], words[LENGTHS]) : NULL;
    if (lengths) claim = recorded(self, bytes, lengths, new);
    Py_XDECREF(bytes);
    Py_XDECREF(lengths);
    return claim;
}

/* --- the claims that another router tells --- */

/* places, known: dictionaries. left, most_new: how many marks the message may have, and how many of
 * new claims. most_known: open claims. The others count. */
typedef struct {
    PyObject *places, *known, *no_lengths;
    double left, most_new, most_known;
    long long new_marks, unknown, excess;
} Telling;

/* Adds a claim to the open ones, of which the oldest goes if there are too many. */
static bool add_known(const Telling *telling, PyObject *number, PyObject *claim) {
    PyObject *first = NULL;
    Py_ssize_t at = 0;
    bool is_full = (double)PyDict_Size(telling->known) >= telling->most_known;
    if (is_full && PyDict_Next(telling->known, &at, &first, NULL)) {
        Py_INCREF(first);
        int failed = PyDict_DelItem(telling->known, first);
        Py_DECREF(first);
        if (failed) return false;
    }
    return !PyDict_SetItem(telling->known, number, claim);
}

/* Records a claim of a known worker, unless it was reported before; false after an error. */
static bool record_new(MarkTable *self, Telling *telling, PyObject *reported, PyObject *bytes,
                       NewClaim new) {
    PyObject *number = PyObject_GetAttr(reported, words[NUMBER]);
    if (!number) return false;
    int is_known = PyDict_Contains(telling->known, number);
    bool is_sound = is_known >= 0;
    if (!is_known) {
        PyObject *claim = recorded(self, bytes, telling->no_lengths, new);
        is_sound = claim && add_known(telling, number, claim);
        telling->new_marks += keys_in(bytes).count;
        Py_XDECREF(claim);
    }
    Py_DECREF(number);
    return is_sound;
}

/* Returns the record of what was sent to the worker of a claim, borrowed; NULL if it is not known, or
 * after an error. */
static PyObject *holdings_of(PyObject *reported, PyObject *places) {
    PyObject *worker = PyObject_GetAttr(reported, words[WORKER]);
    PyObject *place = worker ? PyDict_GetItemWithError(places, worker) : NULL;
    Py_XDECREF(worker);
    if (place && !PyTuple_Check(place)) PyErr_SetString(PyExc_TypeError, "no place");
    return place && PyTuple_Check(place) ? PyTuple_GetItem(place, 1) : NULL;
}

/* Records a claim within the bounds; false after an error. */
static bool record_one(MarkTable *self, Telling *telling, PyObject *reported, NewClaim new) {
    PyObject *bytes = keys_of(reported);
    if (!bytes) return false;
    double count = (double)keys_in(bytes).count;
    bool is_sound = true;
    telling->left -= count;
    if (telling->left < 0.0 || telling->most_new - (double)telling->new_marks < count) {
        telling->excess++;
    } else if ((new.holdings = holdings_of(reported, telling->places))) {
        is_sound = record_new(self, telling, reported, bytes, new);
    } else {
        is_sound = !PyErr_Occurred();
        telling->unknown++;
    }
    Py_DECREF(bytes);
    return is_sound;
}

/* record_reported(reported, places, known, (marks, new_marks, claims), now, since) */
static PyObject *marks_record_reported(MarkTable *self, PyObject *const *given, Py_ssize_t were) {
    double bounds[3];
    if (!are_given(given, were, "tddooo") || !numbers_of(given[3], bounds, 3)) return NULL;
    Telling telling = {.places = given[1], .known = given[2], .left = bounds[0],
                       .most_new = bounds[1], .most_known = bounds[2]};
    NewClaim new = {.now = given[4], .since = given[5]};
    telling.no_lengths = PyTuple_New(0);
    bool is_sound = telling.no_lengths != NULL;
    for (Py_ssize_t n = 0; is_sound && n < PyTuple_Size(given[0]); n++)
        is_sound = record_one(self, &telling, PyTuple_GetItem(given[0], n), new);
    Py_XDECREF(telling.no_lengths);
    if (!is_sound) return NULL;
    return Py_BuildValue("(LLL)", telling.new_marks, telling.unknown, telling.excess);
}

/* --- a claim that is withdrawn --- */

/* Returns claims without one of them. */
static PyObject *claims_but(PyObject *claims, PyObject *claim) {
    PyObject *list = PyList_New(0), *made = NULL;
    Py_ssize_t count = PyTuple_Size(claims);
    bool is_sound = list != NULL;
    for (Py_ssize_t n = 0; is_sound && n < count; n++) {
        PyObject *one = PyTuple_GetItem(claims, n);
        is_sound = one == claim || !PyList_Append(list, one);
    }
    if (is_sound) made = PyList_AsTuple(list);
    Py_XDECREF(list);
    return made;
}

/* Removes a claim from each key; false after an error. */
static bool remove_claim(MarkTable *self, PyObject *claim, Keys keys, long long mark_bytes) {
    for (Py_ssize_t n = 0; n < keys.count; n++) {
        PyObject *claims = claims_of(self, key_at(keys, n));
        if (!claims) continue;
        PyObject *after = claims_but(claims, claim);
        Slot slot = table_find(&self->claims, key_at(keys, n)); /* other code may have run */
        bool is_there = after && slot.shard && PyTuple_Size(after) < PyTuple_Size(claims);
        if (is_there) self->bytes -= mark_bytes;
        if (is_there && PyTuple_Size(after)) {
            put_claims(slot, after);
        } else if (is_there) {
            PyObject *last = claims_in(slot);
            table_remove(&self->claims, slot);
            Py_DECREF(last);
            self->bytes -= (long long)self->slot_cost;
        }
        Py_DECREF(claims);
        if (!after) return false;
        Py_DECREF(after);
    }
    return true;
}

/* withdraw(claim) */
static PyObject *marks_withdraw(MarkTable *self, PyObject *claim) {
    PyObject *bytes = keys_of(claim);
    long long mark_bytes = bytes ? mark_bytes_of(claim) : -1;
    bool is_sound = mark_bytes >= 0 && remove_claim(self, claim, keys_in(bytes), mark_bytes);
    Py_XDECREF(bytes);
    return is_sound ? constant(Py_None) : NULL;
}

/* --- the type --- */

/* MarkTable(make, most, fewer, (slot, place, keys)) */
static PyObject *marks_new(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    PyObject *make, *fewer, *costs;
    Py_ssize_t most;
    double each[3];
    if (!PyArg_ParseTuple(given, "OnOO", &make, &most, &fewer, &costs) ||
        !numbers_of(costs, each, 3))
        return NULL;
    MarkTable *self = (MarkTable *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(make);
    Py_INCREF(fewer);
    self->make = make;
    self->fewer = fewer;
    self->most = most;
    self->slot_cost = each[0];
    self->place_cost = each[1];
    self->keys_cost = each[2];
    /* a hash of Python's has a secret of the process */
    table_init(&self->claims, mix64((uint64_t)PyObject_Hash(words[HOLDINGS])), true);
    self->claims.doubles = true; /* a slot takes less than is counted for it even so */
    return (PyObject *)self;
}

static void marks_dealloc(PyObject *object) {
    MarkTable *self = (MarkTable *)object;
    for (unsigned n = 0; n < SHARDS; n++) {
        Shard *shard = &self->claims.shards[n];
        for (uint32_t at = 0; at < shard->capacity; at++)
            if (entry_at(shard, at)->tag) Py_DECREF(claims_in((Slot){shard, at}));
    }
    table_clear(&self->claims);
    Py_DECREF(self->make);
    Py_DECREF(self->fewer);
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

static Py_ssize_t marks_length(MarkTable *self) { return (Py_ssize_t)self->claims.used; }

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))marks_##name, METH_FASTCALL, NULL}

static PyMethodDef marks_methods[] = {
    METHOD(record),
    METHOD(record_reported),
    METHOD(stretches),
    {"withdraw", (PyCFunction)marks_withdraw, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef marks_members[] = {
    {"bytes", T_LONGLONG, offsetof(MarkTable, bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot marks_slots[] = {
    {Py_tp_doc, "The claims at marks; extproc/_core.pyi describes them."},
    {Py_tp_new, marks_new},
    {Py_tp_dealloc, marks_dealloc},
    {Py_mp_length, marks_length},
    {Py_tp_methods, marks_methods},
    {Py_tp_members, marks_members},
    {0, NULL},
};

PyType_Spec mark_table_spec = {"extproc._core.MarkTable", sizeof(MarkTable), 0,
                               Py_TPFLAGS_DEFAULT, marks_slots};

bool mark_table_prepare(PyObject *type) {
    mark_table_type = (PyTypeObject *)type;
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
