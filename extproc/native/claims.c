/* The walks over claims of extproc._core: extproc/routing/claim_table.py, claims.py and marks.py
 * describe them and have the same in Python. They work on the same objects: dictionaries of tuples
 * of claims, and of overlaps. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stdbool.h>

#include "claims.h"
#include "objects.h"

enum { HOLDINGS, WORKER, LOST_AT, SENT_AT, ENDED_AT, MARK_BYTES, SAVED, WORDS };

static const char *const SPELLED[WORDS] = {"holdings", "worker",     "lost_at", "sent_at",
                                           "ended_at", "mark_bytes", "saved"};

static PyObject *words[WORDS];

static bool number_of(PyObject *object, int word, double *number) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    if (!value) return false;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *number != -1.0 || !PyErr_Occurred();
}

/* chained(key, view, parts, root): the key of each part, in which the one before it is mixed. */
PyObject *module_chained(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "ooto")) return NULL;
    PyObject *key = given[0], *view = given[1], *parts = given[2], *root = given[3];
    Py_ssize_t count = PyTuple_Size(parts);
    PyObject *keys = PyTuple_New(count);
    for (Py_ssize_t n = 0; keys && n < count; n++) {
        PyObject *part = PyObject_GetItem(view, PyTuple_GetItem(parts, n));
        PyObject *next = part ? PyObject_CallFunctionObjArgs(key, part, root, NULL) : NULL;
        Py_XDECREF(part);
        if (!next || PyTuple_SetItem(keys, n, next)) Py_CLEAR(keys);
        root = next; /* the tuple has it */
    }
    return keys;
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

/* Notes what a generation of the table says of marks, as far as it knows them one by one. */
static bool note_generation(PyObject *found, PyObject *generation, PyObject *lengths,
                            PyObject *keys, const Times *times) {
    PyObject *before = NULL;
    Py_ssize_t longest = 0, count = PyTuple_Size(keys);
    bool is_sound = true;
    for (Py_ssize_t n = 0; is_sound && n < count; n++) {
        PyObject *claims = PyDict_GetItemWithError(generation, PyTuple_GetItem(keys, n));
        if (!claims) break;
        if (claims != before) {
            Py_INCREF(claims);
            is_sound = !before || note_stretch(found, before, longest, times);
            Py_XDECREF(before);
            before = claims;
        }
        longest = PyLong_AsSsize_t(PyTuple_GetItem(lengths, n));
    }
    is_sound = is_sound && !PyErr_Occurred() &&
               (!before || note_stretch(found, before, longest, times));
    Py_XDECREF(before);
    return is_sound;
}

/* expected(old, young, lengths, keys, now, (speculative, grace, approximate)) */
PyObject *module_expected(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Times times;
    double lifetimes[3];
    if (!are_given(given, were, "ddttoo") || !read_numbers(given + 4, &times.now, 1) ||
        !numbers_of(given[5], lifetimes, 3))
        return NULL;
    PyObject *old = given[0], *young = given[1], *lengths = given[2], *keys = given[3];
    times.speculative = lifetimes[0];
    times.grace = lifetimes[1];
    times.approximate = lifetimes[2];
    if (PyTuple_Size(lengths) != PyTuple_Size(keys)) {
        PyErr_SetString(PyExc_ValueError, "a length for each key");
        return NULL;
    }
    PyObject *found = PyDict_New();
    if (found && !(note_generation(found, old, lengths, keys, &times) &&
                   note_generation(found, young, lengths, keys, &times)))
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

/* Returns the memory of claims at one mark; -1 after an error. */
static long long bytes_of_claims(PyObject *claims) {
    long long sum = 0;
    Py_ssize_t count = PyTuple_Size(claims);
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(claims, n), words[MARK_BYTES]);
        long long bytes = value ? PyLong_AsLongLong(value) : -1;
        Py_XDECREF(value);
        if (bytes < 0) return -1;
        sum += bytes;
    }
    return sum;
}

typedef struct {
    PyObject *claim, *holdings, *fewer, *since;
    Py_ssize_t most;
} NewClaim;

/* Returns the claims of a mark with the new one, and by how much its memory grows. */
static PyObject *claims_after(PyObject *claims, const NewClaim *new, long long *more) {
    PyObject *after = with_claim(new->claim, claims, new->holdings);
    if (after && PyTuple_Size(after) > new->most) {
        PyObject *all = after;
        after = PyObject_CallFunctionObjArgs(new->fewer, all, new->since, NULL);
        Py_DECREF(all);
    }
    if (!after) return NULL;
    long long before = bytes_of_claims(claims), now = bytes_of_claims(after);
    *more = now - before;
    if (before < 0 || now < 0) Py_CLEAR(after);
    return after;
}

/* Puts the new claim to each key; counts keys that had none, and the memory of it at the others. */
static bool record_claim(PyObject *young, PyObject *keys, const NewClaim *new, Py_ssize_t *alone_at,
                         long long *added) {
    PyObject *alone = PyTuple_Pack(1, new->claim), *before = NULL, *after = NULL;
    long long more = 0;
    bool is_sound = alone != NULL;
    Py_ssize_t count = PyTuple_Size(keys);
    for (Py_ssize_t n = 0; is_sound && n < count; n++) {
        PyObject *key = PyTuple_GetItem(keys, n);
        PyObject *claims = PyDict_GetItemWithError(young, key);
        if (!claims) {
            is_sound = !PyErr_Occurred() && !PyDict_SetItem(young, key, alone);
            (*alone_at)++;
            continue;
        }
        if (claims == alone) { /* the same key twice */
            (*alone_at)++;
            continue;
        }
        if (claims != before) { /* neighbouring marks usually have the same claims */
            Py_XDECREF(before);
            Py_XDECREF(after);
            Py_INCREF(claims);
            before = claims;
            after = claims_after(claims, new, &more);
        }
        is_sound = after && !PyDict_SetItem(young, key, after);
        *added += more;
    }
    Py_XDECREF(alone);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return is_sound;
}

/* recorded(young, claim, keys, most, fewer, since) */
PyObject *module_recorded(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    NewClaim new;
    if (!are_given(given, were, "dotooo") || !read_size(given[3], &new.most)) return NULL;
    PyObject *young = given[0], *keys = given[2];
    new.claim = given[1];
    new.fewer = given[4];
    new.since = given[5];
    Py_ssize_t alone_at = 0;
    long long added = 0;
    new.holdings = PyObject_GetAttr(new.claim, words[HOLDINGS]);
    bool is_sound = new.holdings && record_claim(young, keys, &new, &alone_at, &added);
    Py_XDECREF(new.holdings);
    return is_sound ? Py_BuildValue("(nL)", alone_at, added) : NULL;
}

/* --- what overlaps are worth --- */

/* An overlap of kvstate.overlap: sizes in blocks. */
typedef struct {
    long long block_size, device, certain, uncertain;
    bool is_plain; /* all on the device, and certain */
} HeldBlocks;

static bool read_overlap(PyObject *overlap, HeldBlocks *held) {
    if (!PyTuple_Check(overlap) || PyTuple_Size(overlap) != 5) {
        PyErr_SetString(PyExc_TypeError, "no overlap");
        return false;
    }
    PyObject *tiers = PyTuple_GetItem(overlap, 1);
    if (!PyTuple_Check(tiers) || PyTuple_Size(tiers) != 4) {
        PyErr_SetString(PyExc_TypeError, "no overlap");
        return false;
    }
    held->device = PyLong_AsLongLong(PyTuple_GetItem(tiers, 0));
    long long host = PyLong_AsLongLong(PyTuple_GetItem(tiers, 1));
    long long disk = PyLong_AsLongLong(PyTuple_GetItem(tiers, 2));
    long long remote = PyLong_AsLongLong(PyTuple_GetItem(tiers, 3));
    held->block_size = PyLong_AsLongLong(PyTuple_GetItem(overlap, 0));
    held->uncertain = PyLong_AsLongLong(PyTuple_GetItem(overlap, 2));
    held->certain = held->device + host + disk + remote;
    held->is_plain = !(host || disk || remote || held->uncertain);
    return !PyErr_Occurred();
}

typedef struct {
    PyObject *found, *unsure, *worth, *claims_class;
} Weighing;

/* Returns the claims of a worker with one more overlap; NULL after an error. */
static PyObject *claims_with(const Weighing *weighing, PyObject *before, PyObject *overlap) {
    HeldBlocks held;
    if (!read_overlap(overlap, &held)) return NULL;
    PyObject *worth = held.is_plain
                          ? PyLong_FromLongLong(held.block_size * held.device)
                          : PyObject_CallFunctionObjArgs(weighing->worth, overlap,
                                                         weighing->unsure, NULL);
    if (worth && before) {
        PyObject *own = worth, *saved = PyObject_GetAttr(before, words[SAVED]);
        worth = saved ? PyNumber_Add(own, saved) : NULL;
        Py_XDECREF(saved);
        Py_DECREF(own);
    }
    PyObject *made =
        worth ? PyObject_CallFunctionObjArgs(weighing->claims_class, worth, NULL) : NULL;
    Py_XDECREF(worth);
    return made;
}

/* Adds what workers hold of one prompt; false after an error. */
static bool weigh_overlaps(const Weighing *weighing, PyObject *overlaps) {
    PyObject *name, *overlap;
    Py_ssize_t at = 0;
    while (PyDict_Next(overlaps, &at, &name, &overlap)) {
        PyObject *before = PyDict_GetItemWithError(weighing->found, name);
        if (!before && PyErr_Occurred()) return false;
        PyObject *after = claims_with(weighing, before, overlap);
        bool is_set = after && !PyDict_SetItem(weighing->found, name, after);
        Py_XDECREF(after);
        if (!is_set) return false;
    }
    return true;
}

/* Appends the expected lengths of one prompt that go beyond what is certain; false after an error. */
static bool append_beyond(PyObject *beyond, Py_ssize_t number, PyObject *overlaps,
                          PyObject *expected) {
    PyObject *name, *lengths;
    Py_ssize_t at = 0;
    while (PyDict_Next(expected, &at, &name, &lengths)) {
        long long speculative, approximate;
        HeldBlocks held = {0};
        if (!PyArg_ParseTuple(lengths, "LL", &speculative, &approximate)) return false;
        PyObject *overlap = overlaps ? PyDict_GetItemWithError(overlaps, name) : NULL;
        if (overlap && !read_overlap(overlap, &held)) return false;
        if (PyErr_Occurred()) return false;
        long long most = speculative > approximate ? speculative : approximate;
        if (most <= held.certain * held.block_size) continue;
        PyObject *row = Py_BuildValue("(nOO)", number, name, lengths);
        bool is_added = row && !PyList_Append(beyond, row);
        Py_XDECREF(row);
        if (!is_added) return false;
    }
    return true;
}

/* Returns one of a sequence of dictionaries, borrowed from a list or a tuple. */
static PyObject *dictionary_at(PyObject *list, Py_ssize_t at) {
    PyObject *one = PyList_Check(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
    if (!one || PyDict_Check(one)) return one;
    PyErr_SetString(PyExc_TypeError, "no dictionary");
    return NULL;
}

/* weighed(held, expected, unsure, worth, claims) */
PyObject *module_weighed(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "ooooo")) return NULL;
    PyObject *held = given[0], *expected = given[1];
    Weighing weighing = {.unsure = given[2], .worth = given[3], .claims_class = given[4]};
    Py_ssize_t prompts = PySequence_Size(held), known = PySequence_Size(expected);
    if (prompts < 0 || known < 0) return NULL;
    PyObject *beyond = PyList_New(0);
    weighing.found = PyDict_New();
    bool is_sound = beyond && weighing.found;
    for (Py_ssize_t n = 0; is_sound && n < prompts; n++) {
        PyObject *overlaps = dictionary_at(held, n);
        is_sound = overlaps && weigh_overlaps(&weighing, overlaps);
    }
    for (Py_ssize_t n = 0; is_sound && n < known; n++) {
        PyObject *each = dictionary_at(expected, n);
        PyObject *overlaps = prompts ? dictionary_at(held, n) : NULL;
        is_sound = each && (overlaps || !prompts) && append_beyond(beyond, n, overlaps, each);
    }
    PyObject *made = is_sound ? PyTuple_Pack(2, weighing.found, beyond) : NULL;
    Py_XDECREF(weighing.found);
    Py_XDECREF(beyond);
    return made;
}

/* held_tokens(name, overlaps): how many tokens a worker certainly holds of prompts, and how many perhaps. */
PyObject *module_held(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "oo")) return NULL;
    PyObject *name = given[0], *prompts = given[1];
    long long certain = 0, uncertain = 0;
    Py_ssize_t count = PySequence_Size(prompts);
    for (Py_ssize_t n = 0; n < count; n++) {
        HeldBlocks held;
        PyObject *overlaps = dictionary_at(prompts, n);
        PyObject *overlap = overlaps ? PyDict_GetItemWithError(overlaps, name) : NULL;
        if (PyErr_Occurred() || (overlap && !read_overlap(overlap, &held))) return NULL;
        if (!overlap) continue;
        certain += held.block_size * held.certain;
        uncertain += held.block_size * held.uncertain;
    }
    return count < 0 ? NULL : Py_BuildValue("(LL)", certain, uncertain);
}

bool claims_prepare(void) {
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
